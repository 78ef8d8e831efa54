"""Processes killed at random moments, and what is left of weights and checkpoints."""
