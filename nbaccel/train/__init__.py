"""Data, gradients, collectives, checkpoints."""
