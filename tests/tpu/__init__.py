"""TPUs without a TPU: the real drivers, computing on this machine's processor."""
