"""The memory of training: sizes of a model, activations, and the table of both."""
