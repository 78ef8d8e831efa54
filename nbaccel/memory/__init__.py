"""Estimates of memory and of time per step."""
