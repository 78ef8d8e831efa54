"""Doors to nbaccel in a notebook: magics and what they show."""
