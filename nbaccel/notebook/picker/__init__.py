"""Forms for the settings of a run: their state (`model`), and their widgets (`widgets`)."""
