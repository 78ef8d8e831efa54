"""``AcceleratedScheduler``: a learning-rate schedule that advances when optimizers really step."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbaccel.train import distributed
from nbaccel.train.gradient import GradientState

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """A learning-rate scheduler tied to optimizers.

    A schedule written for one process sees, in one optimizer step of a run, as many batches as
    there are processes; so it advances that many times. It stops silently at its `total_steps`
    (``OneCycleLR``). ``ReduceLROnPlateau``, which counts metrics, always advances once.

    Args:
        scheduler: The scheduler itself.
        optimizers: The optimizers that it waits for: one, or several.
        step_with_optimizer: False leaves it to the caller: every call is one plain step.
        split_batches: Whether a batch is split among the processes, so that one optimizer step is
            one of the schedule, however many there are.
        gradient_state: Says whether the current batch ends a group; None takes the optimizers'.
        num_processes: How many processes train; None: those of this process's group.

    Attributes:
        scheduler: The scheduler itself.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        gradient_state: GradientState | None = None,
        num_processes: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = tuple(
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        states = (getattr(optimizer, "gradient_state", None) for optimizer in self.optimizers)
        self.gradient_state = gradient_state or next(filter(None, states), None) or GradientState()
        self.step_with_optimizer = step_with_optimizer  # whether it waits for the optimizers
        self.steps_per_call = 1
        if not split_batches:
            self.steps_per_call = num_processes or distributed.init_process().world_size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the optimizers stepped; arguments are for the scheduler's own step."""
        if self.gradient_state.is_skipping:
            return
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            # A scheduler constructed by hand may wait for torch's optimizers, without such a flag.
            if getattr(optimizer, "step_was_skipped", False):
                return
        num_steps = self.steps_per_call
        if isinstance(self.scheduler, ReduceLROnPlateau):
            num_steps = 1
        elif self.gradient_state.adjust_scheduler:
            num_steps *= self.gradient_state.batches_in_group
        total_steps = getattr(self.scheduler, "total_steps", None)
        for _ in range(num_steps):
            # Several steps per call may pass the end of a schedule, where OneCycleLR raises.
            if total_steps is not None and self.scheduler.last_epoch >= total_steps:
                return
            self.scheduler.step(*args, **kwargs)

    @property
    def split_batches(self) -> bool:
        """Whether it advances once per optimizer step, however many processes there are."""
        return self.steps_per_call == 1

    def get_last_lr(self) -> list[Any]:
        """The learning rates of the optimizer's groups, as they are now."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        """The result of the scheduler's `get_lr`."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Call the scheduler's `print_lr`; newer torch has none."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        return self.scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Whatever else the scheduler has.
        if name == "scheduler":
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it is constructed")
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheduler!r})"
