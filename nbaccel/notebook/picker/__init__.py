"""A run chosen by looking: what is chosen (`model`), and how it is shown (`widgets`)."""
