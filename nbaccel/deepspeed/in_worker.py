"""What DeepSpeed and Hugging Face Accelerate are taught in a worker, when it imports them.

DeepSpeed says when it compiles. The rest is for DeepSpeed through Accelerate, and its Trainer, in
the workers of a CPU launch.

A CPU worker has ``ACCELERATE_USE_CPU``, without which Accelerate would not find the other
processes. Accelerate 1.15 reads it as "no DeepSpeed", too (``AcceleratorState.__init__``), and
trains with DDP without a word. In a worker that computes on the CPU both hold: the processes meet
over gloo, and a DeepSpeed plugin means DeepSpeed.

Nothing is imported here: classes are changed when the modules that define them are imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from nbaccel import env
from nbaccel.deepspeed import building

__all__ = ["enter_worker"]

_USE_CPU = "ACCELERATE_USE_CPU"


def enter_worker(device: str) -> None:
    """Prepare a worker for DeepSpeed and Accelerate; light where neither is ever imported.

    Args:
        device: Type of the device that the worker computes on.
    """
    changes = _CHANGES | (_CHANGES_ON_CPU if device == "cpu" else {})
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    sys.meta_path.insert(0, _Finder(changes))


def _change_state(module: Any) -> None:
    """Let a plugin mean DeepSpeed, although the CPU was asked for."""
    kind = module.AcceleratorState
    make = kind.__init__
    if hasattr(make, "__wrapped__"):
        return  # forked from a process in which it was done

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("deepspeed_plugin") is None or not env.flag(_USE_CPU):
            make(self, *args, **kwargs)
            return
        if not module.PartialState._shared_state:  # noqa: SLF001 - its only mark
            handed_on = kwargs.keys() - _OF_ACCELERATOR
            module.PartialState(True, **{name: kwargs[name] for name in handed_on})
        _join()
        with env.applied({_USE_CPU: None}):
            make(self, *args, **{**kwargs, "cpu": False})

    kind.__init__ = made


_OF_ACCELERATOR = {
    *("mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    *("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "_from_accelerator"),
}
"""Arguments of its state that are not for the process group."""


def _change_plugin(module: Any) -> None:
    """Let DeepSpeed know the processes from the plugin on: models are made in shards after it."""
    kind = module.DeepSpeedPlugin
    settle = kind.__post_init__
    if hasattr(settle, "__wrapped__"):
        return

    @functools.wraps(settle)
    def settled(self: Any) -> None:
        settle(self)
        if env.flag(_USE_CPU):
            _join()

    kind.__post_init__ = settled


def _join() -> None:
    """Let DeepSpeed take up the process group, if there is one; else it takes itself for alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    from nbaccel.deepspeed.strategy.engines import begin_comm

    begin_comm({})


_CHANGES: dict[str, Callable[[Any], None]] = {building.BUILDER: building.change_builder}
_CHANGES_ON_CPU: dict[str, Callable[[Any], None]] = {
    "accelerate.state": _change_state,
    "accelerate.utils.dataclasses": _change_plugin,
}


class _Finder(MetaPathFinder):
    """Finds some modules as they are, to be changed when they have been executed."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self._changes[name])
        return spec


class _Changing(Loader):
    """A module's own loader, and a change afterwards."""

    def __init__(self, loader: Loader, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:  # `inspect` asks it for the source
        return getattr(self._loader, name)
