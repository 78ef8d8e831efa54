"""Parameters that ZeRO-3 keeps in files: a folder for each engine, and none left behind.

DeepSpeed empties its folder when an engine is made, also where another engine of the process has
its states in it, and leaves the files there when the process ends.

There are no more buffers than `buffer_count`, and what was read ahead stays in one until it is
used. So nothing here takes a buffer: files are read and written directly.
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.leftovers import LeftoverFolders, announce_leftover
from nbaccel.base.units import format_bytes
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig
from nbaccel.deepspeed.zero_memory import DEFAULTS


class Claim:
    """An engine's use of folders on the fast disk."""

    def __init__(self, folders: set[Path], rank: int) -> None:
        self.folders = folders
        # A forked child inherits the claim, but not the files.
        self._pid = os.getpid()
        self.leftovers = [
            LeftoverFolders(
                folder.absolute(),
                f"zero_stage_3/*/rank{rank}",
                whole=folder.name.startswith(_ENGINE_FOLDER_PREFIX),
            )
            for folder in sorted(folders)
        ]

    def release(self) -> None:
        """Remove this process's files; a second time does nothing."""
        if self not in _OPEN_CLAIMS:
            return
        # Also in a forked child, where the exit handler must not come to it again.
        _OPEN_CLAIMS.remove(self)
        if os.getpid() != self._pid:
            return  # a forked child's copy; the files are its parent's
        for leftover in self.leftovers:
            leftover.remove()
            announce_leftover(leftover, is_there=False)


_ENGINE_FOLDER_PREFIX = "engine_"
_OPEN_CLAIMS: list[Claim] = []
"""Of this process: engines of several Accelerators must not meet in one folder."""


def claim(zero_config: ZeroConfig, rank: int) -> tuple[ZeroConfig, Claim]:
    """Give an engine folders that no other engine of this process has."""
    used = folders_in_use()
    own: set[Path] = set()
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero_config, name)
        if section is None or section.device != "nvme":
            continue
        # The user's folder is taken as given where it is free: only further engines get one in it.
        base = Path(section.nvme_path)
        folder = base
        number = 0
        while folder in used:
            number += 1
            folder = base / f"{_ENGINE_FOLDER_PREFIX}{number}"
        zero_config = zero_config.changed(**{name: section.changed(nvme_path=str(folder))})
        own.add(folder)
    new_claim = Claim(own, rank)
    if own:
        _OPEN_CLAIMS.append(new_claim)
    for leftover in new_claim.leftovers:
        # Before the files exist: a worker that is killed cannot remove them, and the notebook does.
        announce_leftover(leftover, is_there=True)
    return zero_config, new_claim


def folders_in_use() -> set[Path]:
    """Those in which engines of this process have files."""
    return {folder for other_claim in _OPEN_CLAIMS for folder in other_claim.folders}


def leave() -> None:
    """Release all: this process ends."""
    for open_claim in tuple(_OPEN_CLAIMS):
        open_claim.release()


# On import, since exit handlers run in reverse order: the environment's, which is registered later
# and destroys engines, comes first. A worker ends by `os._exit`, and calls `leave` beforehand.
atexit.register(leave)


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether this process's part of a parameter is in a file."""
    local_part = getattr(tensor, "ds_tensor", None)
    return getattr(local_part, "final_location", None) == "nvme"


def read_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter, out of its file."""
    # A copy: the engine overwrites the file in a later step, and a mapping would show that.
    return _mapped_part(tensor, is_shared=False).clone()


def write_part(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write this process's part of a parameter into its file."""
    _mapped_part(tensor, is_shared=True)[: values.numel()].copy_(values)
    local_part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    # A part that was read ahead is used from its buffer, where it is outdated by now.
    if local_part.status.name == "AVAILABLE":
        local_part.data.view(-1)[: values.numel()].copy_(values)


def free_buffers(module: nn.Module) -> None:
    """Release what was read ahead, so that there is a buffer for what is gathered next."""
    for parameter in filter(is_on_disk, module.parameters()):
        swapped_parameter: Any = parameter
        # A read that is under way still writes into its buffer.
        swapped_parameter.nvme_swapper.synchronize_reads()
        # A parameter that is gathered, or being gathered, needs its buffer.
        is_used = swapped_parameter.ds_status.name != "NOT_AVAILABLE"
        if swapped_parameter.ds_tensor.status.name == "AVAILABLE" and not is_used:
            swapped_parameter.nvme_swapper.remove_partition_and_release_buffers([swapped_parameter])


def skip_repeated_reads(module: nn.Module) -> None:
    """Let a parameter that several layers use be read ahead once.

    DeepSpeed 0.19 lists it as often as it will be used, and fails on the second time (`already
    assigned swap buffer`): every T5 looks at a layer's weights from outside of the layer.
    """
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in module.parameters())
    # The parameters of an engine share one swapper, which must be wrapped once.
    for swapper in {id(swapper): swapper for swapper in swappers if swapper is not None}.values():
        swapper.swap_in = functools.partial(_read_once, swapper.swap_in)


def check_buffers(model: nn.Module, zero_config: ZeroConfig, world_size: int) -> None:
    """Refuse buffers into which the largest parameter does not go."""
    section = zero_config.offload_param
    if section is None or section.device != "nvme":
        return
    usual_size, usual_count = (
        DEFAULTS[f"{ZERO}.offload_param.{name}"] for name in ("buffer_size", "buffer_count")
    )
    size = usual_size if section.buffer_size is None else int(section.buffer_size)
    count = usual_count if section.buffer_count is None else int(section.buffer_count)
    parts = {
        # A model built in shards has placeholders: `ds_numel` is the size of the whole parameter.
        name: -(-int(getattr(parameter, "ds_numel", parameter.numel())) // world_size)
        for name, parameter in model.named_parameters()
    }
    name = max(parts, key=lambda name: parts[name])
    if parts[name] > size:
        number_bytes = 2 if zero_config.is_on("bf16") or zero_config.is_on("fp16") else 4
        raise ConfigError(
            f"{ZERO}.offload_param.buffer_size={size} is too small: a process reads {parts[name]} "
            f"numbers of {name} from disk, into one buffer. DeepSpeed would stop with 'More "
            f"elements than buffer size'. Set it to {parts[name]} or more; the {count} buffers "
            f"(buffer_count) then take {format_bytes(parts[name] * count * number_bytes)} of host "
            "memory in each process."
        )


def _mapped_part(tensor: Any, *, is_shared: bool) -> torch.Tensor:
    param_swapper = tensor.nvme_swapper
    # DeepSpeed may swap out asynchronously: the file need not have its bytes yet.
    param_swapper.synchronize_writes()
    path = Path(param_swapper.get_path(tensor))
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone: it held this process's part of a parameter of shape "
            f"{tuple(tensor.ds_shape)}, of which there is no copy. Keep the folder "
            "(offload_param.nvme_path) until accelerator.free_memory() has taken the weights "
            "back."
        )
    part_size = int(tensor.ds_tensor.ds_numel)
    return torch.from_file(str(path), shared=is_shared, size=part_size, dtype=tensor.dtype)


def _read_once(swap_in: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    # By id, since tensors compare element by element.
    unique = {id(parameter): parameter for parameter in parameters}
    return swap_in(list(unique.values()), *args, **kwargs)
