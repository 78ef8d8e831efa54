"""The prepared optimizer, under the name by which Accelerate's users import it."""

from __future__ import annotations

from nbaccel.train.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
