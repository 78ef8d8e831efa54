"""The user interface in a notebook: magics, and what they show."""
