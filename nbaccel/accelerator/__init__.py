"""``Accelerator``: the training loop, on whatever there is."""
