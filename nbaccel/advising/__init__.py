"""``advise``: which DeepSpeed configuration to train a model with, by estimate or by trial."""

from __future__ import annotations

from nbaccel.advising.facade import advise

__all__ = ["advise"]
