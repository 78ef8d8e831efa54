"""``Accelerator``: the training loop, on any number of devices."""

from __future__ import annotations

from nbaccel.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
