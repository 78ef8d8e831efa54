"""Checkpoints: written whole or not at all, in the layout that Accelerate reads and writes."""
