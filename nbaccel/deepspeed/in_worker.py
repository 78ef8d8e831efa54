"""Changes to DeepSpeed and Hugging Face Accelerate, made in a worker when it imports them.

DeepSpeed prints a line when it compiles. The rest is for DeepSpeed through Accelerate, and through
transformers' Trainer, in the workers of a CPU launch.

A CPU worker has ``ACCELERATE_USE_CPU``, without which Accelerate would not find the other
processes. Accelerate 1.15 reads it as "no DeepSpeed", too (``AcceleratorState.__init__``), and
silently trains with DDP. In a worker that computes on the CPU both hold: the processes communicate
by gloo, and a DeepSpeed plugin means DeepSpeed.

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

from nbaccel.base import accelerate_library, env
from nbaccel.deepspeed import build_notice

_USE_CPU = "ACCELERATE_USE_CPU"


def explain_signal(signal_name: str, functions: Sequence[str]) -> tuple[str, str] | None:
    """The likely cause and the remedy where a worker without shared memory has crashed."""
    # It crashes without a message.
    if signal_name != "SIGSEGV" or "inference_all_reduce" not in functions:
        return None
    return (
        "DeepSpeed adds up through shared memory, and this worker has none: /dev/shm lacks 66 MiB "
        "for each worker, or it was forked after DeepSpeed had run in the notebook.",
        "Enlarge /dev/shm (docker run --shm-size=1g), and leave start_method at 'auto'.",
    )


def enter_worker(device: str) -> None:
    """Prepare a worker for DeepSpeed and Accelerate; cheap where neither is ever imported."""
    module_changes = _MODULE_CHANGES | (_CHANGES_ON_CPU if device == "cpu" else {})
    for name, module_change in module_changes.items():
        # A forked worker has the modules that the notebook had imported.
        if name in sys.modules:
            module_change(sys.modules[name])
    # In place: the import system holds this very list. An earlier finder is from the process that
    # was forked, perhaps for another device.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ChangeFinder)]
    sys.meta_path.insert(0, _ChangeFinder(module_changes))


def _change_state(changed_module: Any) -> None:
    """Let a plugin mean DeepSpeed, although the CPU was asked for."""
    changed_class = changed_module.AcceleratorState
    init = changed_class.__init__
    if hasattr(init, "__wrapped__"):
        return  # forked from a process that has changed it already

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("deepspeed_plugin") is None or not env.flag(_USE_CPU):
            init(self, *args, **kwargs)
            return
        # First with `cpu`, so that Accelerate finds the other processes and meets them over gloo;
        # then without, as only so its state takes the plugin.
        if not accelerate_library.is_set_up():
            handed_on = kwargs.keys() - _OF_ACCELERATOR
            changed_module.PartialState(
                True, **{argument_name: kwargs[argument_name] for argument_name in handed_on}
            )
        _join_process_group()
        with env.applied({_USE_CPU: None}):
            init(self, *args, **{**kwargs, "cpu": False})

    changed_class.__init__ = made


_OF_ACCELERATOR = {
    *("mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    *("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "_from_accelerator"),
}
"""Arguments of `AcceleratorState` that are not passed on to the process group."""


def _change_plugin(module: Any) -> None:
    """Let DeepSpeed find the processes once there is a plugin: `zero.Init` may come next."""
    changed_class = module.DeepSpeedPlugin
    init = changed_class.__post_init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def settled(self: Any) -> None:
        init(self)
        if env.flag(_USE_CPU):
            _join_process_group()

    changed_class.__post_init__ = settled


def _join_process_group() -> None:
    """Let DeepSpeed take up the process group, if there is one; else it counts one process."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return
    # Here, because this module is imported in every worker, also in those without DeepSpeed.
    from nbaccel.deepspeed.strategy.engines import begin_comm
    from nbaccel.deepspeed.zero_config import ZeroConfig

    begin_comm(ZeroConfig())


_MODULE_CHANGES: dict[str, Callable[[Any], None]] = {
    build_notice.BUILDER: build_notice.change_builder
}
_CHANGES_ON_CPU: dict[str, Callable[[Any], None]] = {
    "accelerate.state": _change_state,
    "accelerate.utils.dataclasses": _change_plugin,
}


class _ChangeFinder(MetaPathFinder):
    """Finds some modules as they are, to be changed when they have been executed."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self,
        module_name: str,
        search_path: Sequence[str] | None,
        target_module: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if module_name not in self._changes:
            return None
        # `PathFinder`, not `importlib.util.find_spec`, which would ask this finder again.
        module_spec = PathFinder.find_spec(module_name, search_path, target_module)
        if module_spec is not None and module_spec.loader is not None:
            module_spec.loader = _ChangingLoader(module_spec.loader, self._changes[module_name])
        return module_spec


class _ChangingLoader(Loader):
    """A module's own loader, and a change afterwards."""

    def __init__(self, loader: Loader, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, module_spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(module_spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:  # `inspect` asks it for the source
        return getattr(self._loader, name)
