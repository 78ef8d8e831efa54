"""``Accelerator``: the training loop, on any number of devices."""

from nbaccel.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
