"""Random generators: seeded, and made equal on all processes."""

from __future__ import annotations

from typing import Any

import torch

from nbaccel.train import distributed, rng
from nbaccel.train.collectives import Collectives
from nbaccel.train.rng import set_seed

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give all processes one random state of process 0; None is none."""
    if rng_type is not None:
        synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(rng_types: list[str], generator: torch.Generator | None = None) -> None:
    """Give all processes the random states of process 0.

    Args:
        rng_types: Some of ``torch``, ``cuda``, ``generator``.
        generator: The one that ``generator`` means.
    """
    rng.synchronize_rng_states(rng_types, generator, Collectives(distributed.init_process()))
