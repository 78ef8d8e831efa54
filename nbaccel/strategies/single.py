"""``SingleStrategy``: one process trains alone."""

from __future__ import annotations

from typing import ClassVar

from nbaccel.plan.contracts.training import Strategy


class SingleStrategy(Strategy):
    """Nothing is wrapped, nothing is exchanged."""

    name: ClassVar[str] = "single"
