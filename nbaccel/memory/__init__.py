"""What a training needs of memory: sizes of a model, activations, and the table of both."""
