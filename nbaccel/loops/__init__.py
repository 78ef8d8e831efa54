"""Training loops, seen from outside."""
