"""nbaccel: train on every chip of this machine, from a notebook cell."""
