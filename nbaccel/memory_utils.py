"""The place where code from before Accelerate 0.17 looks for this function."""

from nbaccel.utils.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
