"""A `Trainer` of transformers that was built in the notebook, in a worker.

It brings an accelerator that knows the notebook's process alone. Before it trains, evaluates or
predicts in a worker for the first time, it gets one that knows the worker's place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from nbaccel import _accelerate, env

__all__ = ["adopt_trainers"]

_MODULE = "transformers.trainer"
_ENTRIES = ("train", "evaluate", "predict")


def adopt_trainers() -> None:
    """Let trainers that come from the notebook find their place in this worker. Once per worker."""
    if (module := sys.modules.get(_MODULE)) is not None:
        _patch(module)
    else:
        sys.meta_path.insert(0, _Patching())


class _Patching(MetaPathFinder):
    """Patches the trainer when it is imported: a method that travels is looked up at once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    for name in _ENTRIES:
        method = getattr(module.Trainer, name, None)
        if method is not None:
            setattr(module.Trainer, name, _adopting(method))


def _adopting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def adopted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_the_notebooks(self):
            _settle(self)
        return method(self, *args, **kwargs)

    return adopted


def _is_the_notebooks(trainer: Any) -> bool:
    """Whether what it knows of its process is not so here."""
    try:
        return bool(trainer.args.world_size != int(env.snapshot()["WORLD_SIZE"])) or (
            not _accelerate.is_set_up()
        )
    except (AttributeError, KeyError):  # what it knew was the process's, and was not taken along
        return True


def _settle(trainer: Any) -> None:
    """Do again what its constructor made of the process it ran in."""
    _accelerate.forget()
    arguments = trainer.args
    vars(arguments).pop("_setup_devices", None)  # a cached property
    vars(arguments).pop("__cached__setup_devices", None)  # its name in older versions
    arguments.device  # noqa: B018 - looks at the process and joins its group
    trainer.create_accelerator_and_postprocess()
    if getattr(trainer, "place_model_on_device", False):
        trainer._move_model_to_device(trainer.model, arguments.device)  # noqa: SLF001 - as its constructor does
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
