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
from dataclasses import dataclass
from typing import Any

from nbaccel import _accelerate, env
from nbaccel.log import get_logger

__all__ = [
    "Before",
    "destroy",
    "forget_groups",
    "forget_modules",
    "live_engines",
    "observe",
    "tear_down",
]

_log = get_logger(__name__)
# Variables by which libraries talk to themselves: `TrainingArguments(deepspeed=...)` sets
# ACCELERATE_USE_DEEPSPEED and leaves it there, and the next Trainer uses DeepSpeed unasked.
_PREFIXES = ("ACCELERATE_", "DEEPSPEED_")


# Where `deepspeed.utils.groups` keeps groups and what it derives from them, in 0.17.0 to 0.19.7.
_GROUPS: dict[str, int | None] = {
    "_EXPERT_PARALLEL_GROUP": None,
    "_EXPERT_PARALLEL_GROUP_RANKS": None,
    "_EXPERT_DATA_PARALLEL_GROUP": None,
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS": None,
    "_ALL_TO_ALL_GROUP": None,
    "_WORLD_GROUP": None,
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": None,
    "_TENSOR_MODEL_PARALLEL_GROUP": None,
    "_MODEL_PARALLEL_GROUP": None,
    "_DATA_PARALLEL_GROUP": None,
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": None,
    "_MPU_TENSOR_MODEL_PARALLEL_RANK": None,
    "expert_tensor_parallel_world_size": 1,
    "mesh_device": None,
    "mpu": None,
}


@dataclass(frozen=True, kw_only=True)
class Before:
    """What was there before, and stays.

    Attributes:
        environ: Variables by which libraries talk to themselves.
        accelerate: Whether Accelerate's shared state was set up.
        hf_config: What transformers holds as the process's DeepSpeed configuration.
    """

    environ: dict[str, str]
    accelerate: bool
    hf_config: Any


def observe() -> Before:
    """Look at what DeepSpeed and those who use it will change.

    Returns:
        What :func:`tear_down` needs to know.
    """
    return Before(
        environ=_library_variables(), accelerate=_accelerate.is_set_up(), hf_config=_hf_config()
    )


def tear_down(before: Before) -> None:
    """End DeepSpeed's part of this process; the next use starts from nothing.

    Engines that are still alive are destroyed: without their process group they cannot train. The
    parameters of ZeRO-3 stay the placeholders that they are.

    Args:
        before: What was observed at the start.
    """
    with contextlib.ExitStack() as steps:  # run from the last to the first, each in any case
        steps.callback(gc.collect)
        steps.callback(_restore_variables, before)
        steps.callback(_forget_transformers, before)
        if not before.accelerate:
            steps.callback(_accelerate.forget)
        steps.callback(_end_groups)
        steps.callback(forget_modules)
        steps.callback(_destroy_engines)


def _destroy_engines() -> None:
    """Take the hooks and buffers of every engine, also of those that a variable still names."""
    for engine in live_engines():
        try:
            destroy(engine)
        except Exception as error:  # a half-made engine must not keep the rest alive
            _log.warning("an engine could not be destroyed: %r", error)


def destroy(engine: Any) -> None:
    """Destroy an engine for good.

    Before 0.19 DeepSpeed does it once more when the engine is collected, which may be after the end
    of the process group that it then asks for its rank.

    Args:
        engine: DeepSpeed's.
    """
    engine.destroy()
    engine.destroy = _nothing


def _nothing() -> None:
    """What a destroyed engine has left to destroy."""


def live_engines() -> list[Any]:
    """All engines of this process, also those that no Accelerator knows."""
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return []
    kind = module.DeepSpeedEngine
    # By its type: `isinstance` would ask the object, and some objects of torch warn when asked.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def forget_modules() -> None:
    """Empty what keeps the modules of a ZeRO-3 run alive after its engine is gone."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        # The start of each forward pass appends to it; only the end of a whole one takes away.
        offload.FWD_MODULE_STACK.clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    if coordinator is not None:
        # A cache on a method: its keys are the coordinator and the submodules.
        for attribute in vars(coordinator.PartitionedParameterCoordinator).values():
            for cached in _cached_inside(attribute):
                cached.cache_clear()


def _cached_inside(function: Any, depth: int = 3) -> Iterator[Any]:
    """Functions with a cache, which may lie in the closure of a decorator that names no one."""
    if hasattr(function, "cache_clear"):
        yield function
    if hasattr(function, "cache_clear") or not depth:
        return
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if callable(cell.cell_contents):
                yield from _cached_inside(cell.cell_contents, depth - 1)


def _end_groups() -> None:
    """Destroy all process groups, through DeepSpeed where it knows of them."""
    distributed = sys.modules.get("torch.distributed")
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # Held until last, so that a group's threads are joined without the GIL; see `_backends`.
        backends = _backends(distributed)
        destroy: Callable[[], None] = distributed.destroy_process_group
        if comm is not None and comm.cdb is not None:
            destroy = comm.destroy_process_group  # it also forgets the groups made from it
        destroy()
        del backends
    forget_groups()


def forget_groups() -> None:
    """Let DeepSpeed make its groups anew where torch's, from which it made them, are gone."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None  # it wraps the group that is gone, and would be taken for the next one
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        _release(groups)


def _release(groups: Any) -> None:
    """Empty DeepSpeed's lists of groups, which only its own `destroy` does, and from 0.19.8 on."""
    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:
        release()
        return
    for name, nothing in _GROUPS.items():
        held = getattr(groups, name, None)
        if isinstance(held, dict):
            held.clear()
        elif held is not None:
            setattr(groups, name, nothing)


def _backends(distributed: Any) -> list[Any]:
    """The C++ side of all groups, as Python holds it.

    ~ProcessGroupGloo joins a thread that may be waiting for the GIL to drop a finished work. Run
    from the destructor of a ProcessGroup it holds the GIL itself: a deadlock. The handles given
    here release the GIL before they destruct, so they must be the last to go.
    """
    groups = list(distributed.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no list
    return [
        group._get_backend(device)  # noqa: SLF001 - no public way to it
        for group in groups
        if hasattr(group, "_device_types")
        for device in group._device_types  # noqa: SLF001 - the same
    ]


def _hf_config() -> Any:
    module = sys.modules.get("transformers.integrations.deepspeed")
    return getattr(module, "_hf_deepspeed_config_weak_ref", None)


def _forget_transformers(before: Before) -> None:
    """While it holds a ZeRO-3 configuration, every model is made of placeholders."""
    module: Any = sys.modules.get("transformers.integrations.deepspeed")
    if module is not None:
        module._hf_deepspeed_config_weak_ref = before.hf_config  # noqa: SLF001 - only unset is public


def _library_variables() -> dict[str, str]:
    return {name: value for name, value in env.snapshot().items() if name.startswith(_PREFIXES)}


def _restore_variables(before: Before) -> None:
    now = _library_variables()
    env.update({name: before.environ.get(name) for name in now.keys() | before.environ.keys()})
