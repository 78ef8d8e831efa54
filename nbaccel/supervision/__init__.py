"""Listening to workers, and what a launch ends with."""
