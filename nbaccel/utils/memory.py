"""Memory: freed, and batch sizes that fit into it."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nbaccel.base.errors import ConfigError, NothingFits
from nbaccel.base.log import get_logger
from nbaccel.base.public_names import name_own
from nbaccel.plan import registry

_log = get_logger(__name__)
# Libraries raise plain RuntimeErrors for it, which only their texts tell apart.
_OUT_OF_MEMORY = (
    " out of memory",  # after CUDA, XPU, NPU, MPS backend, HIP, CPU ...
    "RESOURCE_EXHAUSTED",  # of XLA
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate",
)


def release_memory(*objects: Any) -> list[None]:
    """Free what big objects hold; returns as many Nones, to assign to their names."""
    num_objects = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * num_objects


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return cached memory of torch to the device, after a collection of garbage if wanted."""
    if garbage_collection:
        gc.collect()
    # A device that is not in use has no cache, and emptying it would initialise the device.
    for device in registry.awake_accelerators():
        device.empty_cache()


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] | None = None,
) -> Any:
    """Call a function with smaller and smaller batch sizes until it fits into memory.

    Args:
        function: Called with the batch size before its own arguments; without it: a decorator.
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
    # Accelerate's factor, so that the same sizes are tried.
    smaller = reduce_batch_size_fn or (lambda size: size * 9 // 10)
    parameters = inspect.signature(function).parameters.values()
    if not parameters:
        raise ConfigError(
            f"{function.__name__} takes no argument: find_executable_batch_size could not pass the "
            "batch size to it. Give it a first parameter for that."
        )

    @functools.wraps(function)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if args and len(args) >= len(positional) and not takes_any:
            names = ", ".join(p.name for p in positional[1:])
            raise TypeError(
                f"{function.__name__} gets its batch size from find_executable_batch_size: got "
                f"{len(args)} arguments besides it, and it takes {len(positional) - 1}. Call it as "
                f"{function.__name__}({names})."
            )
        size = starting_batch_size
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not should_reduce_batch_size(error):
                    raise
                _log.warning("batch size %s does not fit into memory", size)
                failed = size
                size = smaller(size)
                # A function that does not reduce the size would repeat this attempt for ever.
                if size >= failed:
                    raise
            # Not in the `except` block: there the traceback still holds the attempt's tensors.
            clear_device_cache(garbage_collection=True)
        raise NothingFits(
            f"No batch size from {starting_batch_size} down to 1 fits into memory. The model alone "
            "is too big for this device. Use a smaller model, a lower precision, or several GPUs "
            "with fsdp_plugin."
        )

    return attempt


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether a smaller batch may help: memory was not enough."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception)
    return isinstance(exception, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY)


name_own(globals())
