"""The prepared scheduler, under the name by which Accelerate's users import it."""

from __future__ import annotations

from typing import Any

from nbaccel.train import distributed
from nbaccel.train.gradient import GradientState
from nbaccel.train.prepared_scheduler import PreparedScheduler

__all__ = ["AcceleratedScheduler"]


class _PreparedSchedulerType(type):
    """Lets what `prepare` returned be an instance of the class by whose name users know it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_public_class = cls is AcceleratedScheduler
        return (
            isinstance(instance, PreparedScheduler)
            if is_public_class
            else super().__instancecheck__(instance)
        )


class AcceleratedScheduler(PreparedScheduler, metaclass=_PreparedSchedulerType):
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
        waited_optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        gradient_states = [
            getattr(optimizer, "gradient_state", None) for optimizer in waited_optimizers
        ]
        super().__init__(
            scheduler,
            waited_optimizers,
            next((state for state in gradient_states if state is not None), GradientState()),
            steps_per_call=1 if split_batches else distributed.init_process().world_size,
            with_optimizer=step_with_optimizer,
        )
