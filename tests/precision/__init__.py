"""Precisions: what they compute in, what they return, and that they leave no trace."""
