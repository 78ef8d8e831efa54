"""``SingleStrategy``: one process trains alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nbaccel.plan.contracts.bundle import Bundle
from nbaccel.plan.contracts.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn


class SingleStrategy(Strategy):
    """Nothing is wrapped, nothing is exchanged."""

    name: ClassVar[str] = "single"

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; the bundle as it is."""
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :meth:`Strategy.unwrap`; the model as it is."""
        return model
