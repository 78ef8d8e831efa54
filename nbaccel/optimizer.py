"""The prepared optimizer, under the name by which Accelerate's users import it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from nbaccel.train.gradient import GradientState
from nbaccel.train.prepared_optimizer import PreparedOptimizer

__all__ = ["AcceleratedOptimizer"]


class _PreparedOptimizerType(type):
    """Lets what `prepare` returned be an instance of the class by whose name users know it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_public_class = cls is AcceleratedOptimizer
        return (
            isinstance(instance, PreparedOptimizer)
            if is_public_class
            else super().__instancecheck__(instance)
        )


class AcceleratedOptimizer(PreparedOptimizer, metaclass=_PreparedOptimizerType):
    """An optimizer made by hand as `prepare` makes them; without an `Accelerator` it always steps.

    Args:
        optimizer: The optimizer itself.
        device_placement: Whether its state goes to the device of its parameters; it does.
        scaler: What scaled the loss; None where nothing did.
    """

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, scaler: Any = None
    ) -> None:
        super().__init__(optimizer, GradientState(), scaler)
        self.device_placement = device_placement
