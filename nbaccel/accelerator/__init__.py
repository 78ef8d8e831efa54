"""``Accelerator``: the training loop, on whatever there is."""

from __future__ import annotations

from nbaccel.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
