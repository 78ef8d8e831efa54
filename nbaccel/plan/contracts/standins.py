"""Stand-ins for an optimizer and a schedule that a configuration file describes.

A training loop has both; where DeepSpeed's file says which they are, the loop is written with these
and `prepare` puts the real ones in their place. Names and arguments are Accelerate's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["DummyOptim", "DummyScheduler"]


class _Unsaid(float):
    """A default, whose type tells it from the same number given by a caller."""


class _UnsaidSteps(int):
    """The same of a whole number."""


_LR = _Unsaid(0.001)
_WEIGHT_DECAY = _Unsaid(0)
_WARMUP = _UnsaidSteps(0)


def _given(arguments: dict[str, Any]) -> frozenset[str]:
    defaults = (_Unsaid, _UnsaidSteps)
    return frozenset(name for name, value in arguments.items() if not isinstance(value, defaults))


class DummyOptim:
    """Stands for the optimizer of a DeepSpeed configuration.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate, where the file has ``"auto"``.
        weight_decay: Weight decay, where the file has ``"auto"``.
        **kwargs: Further arguments (``betas``, ``eps``), where the file has ``"auto"``.

    Attributes:
        params: Parameters, or parameter groups, as a list.
        lr: As given.
        weight_decay: As given.
        kwargs: As given.
        given: What was given of these, by name. A default was not chosen by the user, so it
            contradicts no file; it fills in ``"auto"`` all the same.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = _LR,
        weight_decay: float = _WEIGHT_DECAY,
        **kwargs: Any,
    ) -> None:
        # A list, because a generator could be read only once.
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self.given = _given({"lr": lr, "weight_decay": weight_decay, **kwargs})


class DummyScheduler:
    """Stands for the schedule of a DeepSpeed configuration.

    Args:
        optimizer: The optimizer, or what stands for it.
        total_num_steps: Calls of ``step`` in a loop of one process; divided by the number of
            processes, as a loop of several makes fewer.
        warmup_num_steps: Steps of warm-up.
        lr_scheduler_callable: Makes the schedule from the optimizer, in place of the file's.
        **kwargs: Kept.

    Attributes:
        optimizer: As given.
        total_num_steps: As given.
        warmup_num_steps: As given.
        lr_scheduler_callable: As given.
        kwargs: As given.
        given: ``warmup_num_steps``, where it was given.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = _WARMUP,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self.given = _given({"warmup_num_steps": warmup_num_steps})
