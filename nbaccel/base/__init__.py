"""Errors, messages, files, the environment."""
