"""Strategies, with real process groups; and the same training with each of them."""
