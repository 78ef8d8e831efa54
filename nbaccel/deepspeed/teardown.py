"""Leave nothing behind: what DeepSpeed, Accelerate and transformers keep for a whole process.

DeepSpeed is made for scripts, which end. In a notebook its engines stay registered, its lists keep
modules alive, its wrapper of torch's process group outlives the group, and transformers goes on
training with DeepSpeed because a variable says so.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nbaccel.base import env, training_libraries
from nbaccel.base.log import get_logger
from nbaccel.deepspeed import private_api

_log = get_logger(__name__)
# Variables that these libraries set and read themselves: `TrainingArguments(deepspeed=...)` sets
# ACCELERATE_USE_DEEPSPEED and leaves it there, and the next Trainer would use DeepSpeed unasked.
_VARIABLE_PREFIXES = ("ACCELERATE_", "DEEPSPEED_")


class Before(NamedTuple):
    """What was there before, and is restored."""

    variables: dict[str, str]
    is_accelerate_set_up: bool
    hf_config: Any
    """What transformers holds as the process's DeepSpeed configuration."""


def observe() -> Before:
    """Look at what DeepSpeed and those who use it will change."""
    is_set_up = training_libraries.accelerate_is_set_up()
    return Before(_library_variables(), is_set_up, private_api.hf_config_reference())


def tear_down(state_before: Before) -> None:
    """End DeepSpeed's part of this process; the next use starts from nothing.

    Engines that are still alive are destroyed: without their process group they cannot train. The
    parameters of ZeRO-3 stay the placeholders that they are.
    """
    with contextlib.ExitStack() as steps:  # run from the last to the first, each in any case
        # Last of all: only then do no hooks, lists and groups hold engines and modules any more.
        steps.callback(gc.collect)
        steps.callback(_restore_variables, state_before.variables)
        # While it holds a ZeRO-3 configuration, every model is made of placeholders.
        steps.callback(private_api.keep_hf_config_reference, state_before.hf_config)
        if not state_before.is_accelerate_set_up:
            steps.callback(training_libraries.forget_accelerate)
        # After the engines, some of which ask their group for a rank when they are destroyed.
        steps.callback(_end_groups)
        steps.callback(forget_modules)
        steps.callback(_destroy_engines)


def _destroy_engines() -> None:
    """Remove hooks and buffers of every engine, also of those that a variable still names."""
    for engine in live_engines():
        try:
            destroy(engine)
        except Exception as error:  # a half-made engine must not keep the rest alive
            _log.warning("an engine could not be destroyed: %r", error)


def destroy(engine: Any) -> None:
    """Destroy an engine for good.

    Before 0.19 DeepSpeed does it once more when the engine is collected, which may be after the end
    of the process group that it then asks for its rank.
    """
    engine.destroy()
    engine.destroy = lambda: None


def live_engines() -> list[Any]:
    """All engines of this process, also those that no Accelerator made."""
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return []
    # DeepSpeed has no list of its engines; the garbage collector tracks all of them.
    engine_class = module.DeepSpeedEngine
    # By type: `isinstance` reads `__class__` of each object, and some objects of torch warn then.
    return [found for found in gc.get_objects() if issubclass(type(found), engine_class)]


def forget_modules() -> None:
    """Empty what keeps the modules of a ZeRO-3 run alive after its engine is gone."""
    offload_module = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload_module is not None:
        # The start of each forward pass appends to it; only the end of a whole one takes away.
        offload_module.FWD_MODULE_STACK.clear()
    coordinator_module = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    if coordinator_module is not None:
        # A cache on a method: its keys are the coordinator and the submodules.
        for attribute in vars(coordinator_module.PartitionedParameterCoordinator).values():
            for function in _cached_inside(attribute):
                function.cache_clear()


def _cached_inside(function: Any, depth: int = 3) -> Iterator[Any]:
    """Functions with a cache, which may be in the closure of a decorator without `__wrapped__`."""
    if hasattr(function, "cache_clear"):
        yield function
    # Three levels are more than DeepSpeed's decorators have; a closure may lead back to itself.
    if hasattr(function, "cache_clear") or not depth:
        return
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if callable(cell.cell_contents):
                yield from _cached_inside(cell.cell_contents, depth - 1)


def _end_groups() -> None:
    """Destroy all process groups, through DeepSpeed where it has taken them up."""
    distributed_module = sys.modules.get("torch.distributed")
    comm_module: Any = sys.modules.get("deepspeed.comm.comm")
    if (
        distributed_module is not None
        and distributed_module.is_available()
        and distributed_module.is_initialized()
    ):
        # Held until last: their threads are joined without the GIL, see `_group_backends`.
        group_backends = _group_backends()
        destroy_groups: Callable[[], None] = distributed_module.destroy_process_group
        if comm_module is not None and comm_module.cdb is not None:
            # DeepSpeed's function also forgets the groups that it made from the default one.
            destroy_groups = comm_module.destroy_process_group
        destroy_groups()
        del group_backends
    forget_groups()


def forget_groups() -> None:
    """Make DeepSpeed forget the groups that it made from those of torch, which are gone."""
    comm_module: Any = sys.modules.get("deepspeed.comm.comm")
    if comm_module is not None:
        # It wraps the group that is gone, and `init_distributed` would take it for the next one.
        comm_module.cdb = None
    groups_module: Any = sys.modules.get("deepspeed.utils.groups")
    if groups_module is not None:
        private_api.forget_group_references(groups_module)


def _group_backends() -> list[Any]:
    """The C++ side of all groups, as Python holds it.

    ~ProcessGroupGloo joins a thread that may be waiting for the GIL to drop a finished work. Run
    from the destructor of a ProcessGroup it holds the GIL itself: a deadlock. The handles given
    here release the GIL before they destruct, so they must be the last to go.
    """
    # Where there is a group, torch is loaded; everywhere else this module does without it.
    from nbaccel.base import torch_private

    return [
        backend
        for group in torch_private.process_groups()
        for backend in torch_private.device_backends(group)
    ]


def _library_variables() -> dict[str, str]:
    return {
        name: value for name, value in env.snapshot().items() if name.startswith(_VARIABLE_PREFIXES)
    }


def _restore_variables(variables_before: dict[str, str]) -> None:
    # None unsets a variable that was not there before.
    env.update({**dict.fromkeys(_library_variables()), **variables_before})
