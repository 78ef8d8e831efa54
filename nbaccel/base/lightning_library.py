"""A Lightning `Trainer` that was built in the notebook: what it was built for, workers are not.

Its strategy and its launcher are chosen once, in the constructor, for the process that it runs in.
In a worker it would train alone, or start processes of its own and wait for them for good.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.import_patches import patch_module

__all__ = [
    "TRAINER_ENTRIES",
    "TRAINER_MODULES",
    "guard_trainers",
    "is_trainer",
    "tell_of_worker",
    "trainer_refusal",
]

TRAINER_MODULES = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
"""One package under two names; each has a class `Trainer` of its own."""
TRAINER_ENTRIES = ("fit", "validate", "test", "predict")
_PACKAGES = frozenset(("lightning", "lightning_fabric", "pytorch_lightning"))
_BUILT_IN = "_nbaccel_built_in_process"


def _trainer_classes() -> Iterator[type]:
    # Not imported: without the module there can be no such object.
    for name in TRAINER_MODULES:
        trainer_class = getattr(sys.modules.get(name), "Trainer", None)
        if isinstance(trainer_class, type):
            yield trainer_class


def is_trainer(candidate: Any) -> bool:
    """Whether it is a Lightning `Trainer`; Lightning is not imported for it."""
    return isinstance(candidate, tuple(_trainer_classes()))


def trainer_refusal(trainer: Any, trainer_path: str, entry_name: str, num_workers: int) -> str:
    """Why workers cannot call a method of a trainer from the notebook, and what to do.

    Args:
        trainer: The trainer.
        trainer_path: How the user would write it.
        entry_name: The method.
        num_workers: Workers on one machine.

    Returns:
        The message.
    """
    strategy_name = type(getattr(trainer, "strategy", None)).__name__
    num_built_for = getattr(trainer, "world_size", 1)
    return (
        f"{trainer_path}.{entry_name}() cannot be called in {num_workers} workers: {trainer_path} "
        "is a Lightning Trainer that was built outside of them, for "
        f"{'one process' if num_built_for == 1 else f'{num_built_for} processes of its own'} "
        f"({strategy_name}), and that cannot be changed afterwards. "
        + (
            "Each worker would train alone, on all of the data. "
            if num_built_for == 1
            else "It would wait for processes that never start. "
        )
        + f"Build it in the function or cell that the workers run: Trainer(devices={num_workers}, "
        f'strategy="ddp").{entry_name}(...); or call {trainer_path}.{entry_name}(...) in the '
        "notebook, without workers: Lightning starts processes by itself."
    )


def guard_trainers() -> None:
    """Refuse, in this worker, trainers that were not built in it. Once per worker."""
    for name in TRAINER_MODULES:
        patch_module(name, _guard_trainer)


def _guard_trainer(module: ModuleType) -> None:
    trainer_class = module.Trainer
    trainer_class.__init__ = _marking_constructor(trainer_class.__init__)
    for name in TRAINER_ENTRIES:
        entry_method = getattr(trainer_class, name, None)
        if entry_method is not None:
            setattr(trainer_class, name, _guarded_method(name, entry_method))


def _marking_constructor(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        setattr(self, _BUILT_IN, os.getpid())

    return marked


def _guarded_method(name: str, entry_method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry_method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if getattr(self, _BUILT_IN, None) != os.getpid():
            variables = env.snapshot()
            num_workers = int(variables.get("LOCAL_WORLD_SIZE", "1"))
            # One worker is as alone as the notebook is.
            if int(variables.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError(trainer_refusal(self, "trainer", name, num_workers))
        return entry_method(self, *args, **kwargs)

    return guarded


def tell_of_worker(rank: int) -> None:
    """Correct what Lightning has found when it was imported: before this process was forked.

    Args:
        rank: This worker's.
    """
    rank_module = sys.modules.get("lightning_utilities.core.rank_zero")
    if (rank_zero_only := getattr(rank_module, "rank_zero_only", None)) is not None:
        rank_zero_only.rank = rank
    # Modules of both packages have the answer under this name, which they import from each other.
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and "_IS_INTERACTIVE" in vars(module):
            vars(module)["_IS_INTERACTIVE"] = False
