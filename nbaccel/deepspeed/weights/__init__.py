"""Weights of ZeRO: out of checkpoints and engines, whole, with memory for one piece at a time."""
