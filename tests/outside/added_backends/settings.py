from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AveragingSettings:
    """How gradients are averaged."""

    weight: float = 1.0
