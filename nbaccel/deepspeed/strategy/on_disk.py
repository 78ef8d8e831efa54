"""Parameters that ZeRO-3 keeps in files, of which DeepSpeed reads a few into buffers at a time.

There are no more buffers than `buffer_count`, and what was read ahead stays in one until it is
used. So nothing here needs a buffer to itself: files are read and written as files.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.deepspeed.config import ZERO
from nbaccel.errors import ConfigError
from nbaccel.units import format_bytes

__all__ = [
    "check_buffers",
    "free_buffers",
    "is_on_disk",
    "read_part",
    "skip_repeated_reads",
    "write_part",
]

_BUFFERS = {"buffer_size": 100_000_000, "buffer_count": 5}
"""DeepSpeed's defaults: numbers in a buffer, and how many buffers."""


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether this process's part of a parameter is in a file.

    Args:
        tensor: Any tensor.
    """
    part = getattr(tensor, "ds_tensor", None)
    return getattr(part, "final_location", None) == "nvme"


def read_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter, out of its file.

    Args:
        tensor: A placeholder whose part is on disk.

    Returns:
        Shape (elements of a part,), the parameter's dtype, in memory of its own.

    Raises:
        ConfigError: The file is gone.
    """
    return _mapped(tensor, shared=False).clone()


def write_part(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write this process's part of a parameter into its file.

    Args:
        tensor: A placeholder whose part is on disk.
        values: Its first elements, of shape (elements,), any dtype; padding stays as it is.

    Raises:
        ConfigError: The file is gone.
    """
    _mapped(tensor, shared=True)[: values.numel()].copy_(values)
    part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    if part.status == _status().AVAILABLE:  # read ahead: what is in the buffer is old now
        part.data.view(-1)[: values.numel()].copy_(values)


def free_buffers(module: nn.Module) -> None:
    """Let go what was read ahead, so that there is a buffer for what is gathered next.

    Args:
        module: The user's own module inside the engine.
    """
    for parameter in filter(is_on_disk, module.parameters()):
        held: Any = parameter
        held.nvme_swapper.synchronize_reads()
        is_used = held.ds_status.name != "NOT_AVAILABLE"
        if held.ds_tensor.status == _status().AVAILABLE and not is_used:
            held.nvme_swapper.remove_partition_and_release_buffers([held])


def skip_repeated_reads(module: nn.Module) -> None:
    """Let a parameter that several layers use be read ahead once.

    DeepSpeed 0.19 lists it as often as it will be used, and fails on the second time (`already
    assigned swap buffer`): every T5 looks at a layer's weights from outside of the layer.

    Args:
        module: The user's own module inside the engine.
    """
    swappers = {id(found): found for p in module.parameters() if (found := _swapper(p)) is not None}
    for swapper in swappers.values():
        swapper.swap_in = _once(swapper.swap_in)


def check_buffers(model: nn.Module, settings: Mapping[str, Any], world_size: int) -> None:
    """Refuse buffers into which the largest parameter does not go.

    Args:
        model: The model, built already.
        settings: Without ``"auto"``.
        world_size: Processes.

    Raises:
        ConfigError: They are too small.
    """
    section = settings.get(ZERO, {}).get("offload_param") or {}
    if section.get("device") != "nvme":
        return
    size, count = (int(section.get(key, default)) for key, default in _BUFFERS.items())
    parts = {
        name: -(-int(getattr(p, "ds_numel", p.numel())) // world_size)
        for name, p in model.named_parameters()
    }
    name = max(parts, key=lambda key: parts[key])
    needed = parts[name]
    if needed > size:
        itemsize = 2 if any((settings.get(k) or {}).get("enabled") for k in ("bf16", "fp16")) else 4
        memory = format_bytes(needed * count * itemsize)
        raise ConfigError(
            f"{ZERO}.offload_param.buffer_size={size} is too small: a process reads "
            f"{needed} numbers of {name} from disk, into one buffer. DeepSpeed "
            f"would stop with 'More elements than buffer size'. Set it to {needed} or more; the "
            f"{count} buffers (buffer_count) then take {memory} of host memory in each process."
        )


def _mapped(tensor: Any, *, shared: bool) -> torch.Tensor:
    swapper = tensor.nvme_swapper
    swapper.synchronize_writes()
    path = Path(swapper.get_path(tensor))
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone: it held this process's part of a parameter of shape "
            f"{tuple(tensor.ds_shape)}, which is nowhere else. Keep the folder "
            "(offload_param.nvme_path) until accelerator.free_memory() has taken the weights back."
        )
    size = int(tensor.ds_tensor.ds_numel)
    return torch.from_file(str(path), shared=shared, size=size, dtype=tensor.dtype)


def _swapper(parameter: Any) -> Any:
    return getattr(parameter, "nvme_swapper", None)


def _once(swap_in: Any) -> Any:
    @functools.wraps(swap_in)
    def read(params: Any, *args: Any, **kwargs: Any) -> Any:
        return swap_in(list({id(p): p for p in params}.values()), *args, **kwargs)

    return read


def _status() -> Any:
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    return PartitionedParamStatus
