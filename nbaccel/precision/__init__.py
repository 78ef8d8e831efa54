"""Precisions: one module per family of number formats."""
