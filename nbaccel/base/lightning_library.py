"""A Lightning `Trainer` that was built in the notebook: what it was built for, workers are not.

Its strategy and its launcher are chosen once, in the constructor, for the process that it runs in.
Seen with Lightning 2.6 in a launch of two workers: a trainer of one process trained alone in each,
on all of the data, and one with `ddp_notebook` waited for processes that never started.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.import_patches import patch_module

_TRAINER_MODULES = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
"""One package under two names; each has a class `Trainer` of its own."""
_TRAINER_ENTRIES = ("fit", "validate", "test", "predict")
_PACKAGES = frozenset(("lightning", "lightning_fabric", "pytorch_lightning"))
_BUILT_IN = "_nbaccel_built_in_process"


def guard_trainers() -> None:
    """Refuse, in this worker, trainers that were not built in it. Once per worker."""
    for module_name in _TRAINER_MODULES:
        patch_module(module_name, _guard_trainer)


def _guard_trainer(trainer_module: ModuleType) -> None:
    trainer_class = trainer_module.Trainer
    trainer_class.__init__ = _marking_constructor(trainer_class.__init__)
    for entry_name in _TRAINER_ENTRIES:
        entry_method = getattr(trainer_class, entry_name, None)
        if entry_method is not None:
            setattr(trainer_class, entry_name, _guarded_method(entry_name, entry_method))


def _marking_constructor(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        setattr(self, _BUILT_IN, os.getpid())

    return marked


def _guarded_method(entry_name: str, entry_method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry_method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if getattr(self, _BUILT_IN, None) != os.getpid():
            variables = env.snapshot()
            num_workers = int(variables.get("LOCAL_WORLD_SIZE", "1"))
            # One worker is as alone as the notebook is.
            if int(variables.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError(_trainer_refusal(self, entry_name, num_workers))
        return entry_method(self, *args, **kwargs)

    return guarded


def _trainer_refusal(trainer: Any, entry_name: str, num_workers: int) -> str:
    strategy_name = type(getattr(trainer, "strategy", None)).__name__
    num_built_for = getattr(trainer, "world_size", 1)
    if num_built_for == 1:
        processes = "one process"
        outcome = "Each worker would train alone, on all of the data."
    else:
        processes = f"{num_built_for} processes of its own"
        outcome = "It would wait for processes that never start."
    return (
        f"trainer.{entry_name}() cannot be called in {num_workers} workers: trainer is a Lightning "
        f"Trainer that was built outside of them, for {processes} ({strategy_name}), and that "
        f"cannot be changed afterwards. {outcome} Build it in the function or cell that the "
        f'workers run: Trainer(devices={num_workers}, strategy="ddp").{entry_name}(...); or call '
        f"trainer.{entry_name}(...) in the notebook, without workers: Lightning starts processes "
        "by itself."
    )


def tell_of_worker(rank: int) -> None:
    """Correct what Lightning has found when it was imported: before this process was forked.

    Seen with Lightning 2.6 in a kernel: Trainer and Fabric refused to start in workers, as they do
    where somebody types (`sys.ps1`).
    """
    rank_module = sys.modules.get("lightning_utilities.core.rank_zero")
    if (rank_zero_only := getattr(rank_module, "rank_zero_only", None)) is not None:
        rank_zero_only.rank = rank
    # Modules of both packages have the answer under this name, which they import from each other.
    for module_name, module in tuple(sys.modules.items()):
        if module_name.partition(".")[0] in _PACKAGES and "_IS_INTERACTIVE" in vars(module):
            vars(module)["_IS_INTERACTIVE"] = False
