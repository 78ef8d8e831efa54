"""Estimates of memory, and what fits."""
