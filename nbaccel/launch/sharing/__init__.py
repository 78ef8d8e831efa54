"""One copy of a model for all workers: the memory, the arena, the parcel and the way home."""
