"""Functions that training code uses beside an `Accelerator`, under the names Accelerate has.

The collectives here work on the process group of this process, with or without an `Accelerator`.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, MutableSequence
from typing import Any

import torch
from tqdm import auto

from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from nbaccel.errors import ConfigError, NothingFits
from nbaccel.log import get_logger
from nbaccel.train import arrival
from nbaccel.train import rng as _rng
from nbaccel.train.collectives import Collectives
from nbaccel.train.rng import set_seed
from nbaccel.train.trackers import LoggerType
from nbaccel.train.trees import concatenate, find_batch_size, send_to_device

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]

_log = get_logger(__name__)
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate",
)


def _together() -> Collectives:
    place = arrival.arrive()
    return Collectives(place)


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    _together().barrier()


def gather(tensor: Any) -> Any:
    """Join every process's tensors along their first dimension; see `Accelerator.gather`."""
    return _together().gather(tensor)


def gather_object(object: Any) -> list[Any]:  # noqa: A002  (Accelerate's name)
    """Join every process's list of picklable objects."""
    return _together().gather_object(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine every process's tensors element by element: ``sum``, ``mean`` or ``max``."""
    return _together().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy one process's tensors into everybody's, in place."""
    return _together().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy one process's list of picklable objects into everybody's, in place."""
    return _together().broadcast_object_list(object_list, from_process)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Make every process's tensors equally long in one dimension."""
    return _together().pad_across_processes(tensor, dim, pad_index, pad_first)


def synchronize_rng_states(rng_types: list[str], generator: torch.Generator | None = None) -> None:
    """Give all processes the random states of process 0.

    Args:
        rng_types: Of ``torch``, ``cuda``, ``generator``.
        generator: The one that ``generator`` means.
    """
    _rng.synchronize_rng_states(rng_types, generator, _together())


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar that only process 0 of each node shows.

    Args:
        *args: Of ``tqdm``.
        main_process_only: False shows one per process.
        **kwargs: Of ``tqdm``; ``disable=True`` hides it here, too.

    Returns:
        The bar.
    """
    if main_process_only and arrival.local_rank() != 0:
        kwargs["disable"] = True
    return auto.tqdm(*args, **kwargs)


def release_memory(*objects: Any) -> list[None]:
    """Free what big objects hold.

    Args:
        *objects: What the caller lets go of.

    Returns:
        As many Nones, to assign: ``model, optimizer = release_memory(model, optimizer)``.
    """
    held: MutableSequence[Any] = list(objects)
    held.clear()
    _free()
    return [None] * len(objects)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] | None = None,
) -> Any:
    """Call a function with smaller and smaller batch sizes until it fits into memory.

    Args:
        function: Called with the batch size before its own arguments; without it, a decorator is
            returned.
        starting_batch_size: The first one to try.
        reduce_batch_size_fn: From one that did not fit to the next; by default nine tenths of it.

    Returns:
        The function, to be called without a batch size.

    Raises:
        ConfigError: The function takes no argument.
        NothingFits: (In a call) not even one row fits.
        TypeError: (In a call) a batch size was given, too.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    smaller = reduce_batch_size_fn or (lambda size: size * 9 // 10)
    _check_first_argument(function)

    @functools.wraps(function)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        _check_call(function, args)
        size = starting_batch_size
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not _is_out_of_memory(error):
                    raise
                _log.warning("batch size %s does not fit into memory", size)
                failed, size = size, smaller(size)
                if size >= failed:
                    raise
            _free()
        raise NothingFits(
            f"No batch size from {starting_batch_size} down to 1 fits into memory. The model alone "
            "is too big for this device. Use a smaller model, a lower precision, or several GPUs "
            "with fsdp_plugin."
        )

    return attempt


def _check_first_argument(function: Callable[..., Any]) -> None:
    if not inspect.signature(function).parameters:
        raise ConfigError(
            f"{function.__name__} takes no argument: find_executable_batch_size would have nowhere "
            "to put the batch size. Let it take one first."
        )


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    positional = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if args and len(args) >= len(positional) and not _takes_any(function):
        names = ", ".join(p.name for p in positional[1:])
        raise TypeError(
            f"{function.__name__} gets its batch size from find_executable_batch_size: got "
            f"{len(args)} arguments beside it, and it takes {len(positional) - 1}. Call it as "
            f"{function.__name__}({names})."
        )


def _takes_any(function: Callable[..., Any]) -> bool:
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(part in text for part in _OUT_OF_MEMORY)
