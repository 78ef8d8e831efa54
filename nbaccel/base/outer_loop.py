"""How far a loop around a loop over batches is: the epochs of a training."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OuterLoop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoop:
    """A loop over epochs at one moment. What follows its rounds is no part of it."""

    total: int
    """Epochs in all."""
    done: int
    """Epochs that are over."""
    done_s: float
    """What these took, in seconds."""
    round_s: float
    """Seconds since then."""
    done_steps: int
    """Batches that were used in them, of all loops."""
    round_steps: int
    """Batches that have been used since then."""
