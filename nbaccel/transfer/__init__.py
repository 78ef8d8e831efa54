"""Models, weights, functions and names between the notebook and its workers."""
