"""The prepared scheduler, under the name by which Accelerate's users import it."""

from __future__ import annotations

from nbaccel.train.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
