"""Two recipes as TransformerEngine 2.20 has them; the real ones are tested beside this."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = 1
    HYBRID = 2


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
