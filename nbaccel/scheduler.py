"""The prepared scheduler, under the name by which Accelerate's users import it."""

from __future__ import annotations

from typing import Any

from nbaccel.train import arrival
from nbaccel.train.gradient import GradientState
from nbaccel.train.scheduler import PreparedScheduler

__all__ = ["AcceleratedScheduler"]


class _WhatPrepareMakes(type):
    """Lets what `prepare` returned be an instance of the class by whose name users know it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        own = cls is AcceleratedScheduler
        return (
            isinstance(instance, PreparedScheduler) if own else super().__instancecheck__(instance)
        )


class AcceleratedScheduler(PreparedScheduler, metaclass=_WhatPrepareMakes):
    """A scheduler made by hand as `prepare` makes them.

    Args:
        scheduler: The scheduler itself.
        optimizers: The prepared optimizers that it waits for: one, or several.
        step_with_optimizer: False: every call is one plain step.
        split_batches: Whether a batch is split among the processes, so that one optimizer step is
            one of the schedule, however many there are.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        waited_for = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        states = [getattr(one, "gradient_state", None) for one in waited_for]
        super().__init__(
            scheduler,
            waited_for,
            next((state for state in states if state is not None), GradientState()),
            steps_per_call=1 if split_batches else arrival.arrive().world_size,
            with_optimizer=step_with_optimizer,
        )
