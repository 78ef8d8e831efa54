"""The disk that parameters or the optimizer are swapped to: whether it can be used, and has room.

DeepSpeed writes to it from C++, which ends the process where it cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.config.dotted import value_at
from nbaccel.deepspeed.config import ZERO, ZeroConfig
from nbaccel.deepspeed.decided import nvme_folders
from nbaccel.deepspeed.estimate import estimate_memory
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.deepspeed.shape import measure
from nbaccel.disk import free_bytes, nearest_folder
from nbaccel.errors import ConfigError
from nbaccel.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_room", "folder_mistakes"]

_SECTIONS = ("offload_optimizer", "offload_param")


def folder_mistakes(config: ZeroConfig) -> Iterator[str]:
    """Why a folder that is to be swapped to cannot be used, found by writing there.

    Args:
        config: The configuration.

    Yields:
        A message each.
    """
    for name in _SECTIONS:
        section = getattr(config, name)
        path = section.nvme_path if section is not None and section.device == "nvme" else None
        if not path or path == AUTO:
            continue
        problem = _problem(Path(path))
        if problem:
            yield (
                f"{ZERO}.{name}.nvme_path={path!r} cannot be used: {problem}. DeepSpeed would fail "
                "in every process when it makes its engine. Give a folder on a local disk that "
                "you may write to."
            )


def _problem(folder: Path) -> str:
    try:
        nearest = nearest_folder(folder)
        if not nearest.is_dir():
            return f"{str(nearest)!r} is a file"
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"nbaccel")
            probe.flush()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def check_room(
    model: nn.Module,
    settings: Mapping[str, Any],
    *,
    trains: bool,
    local_world_size: int,
    num_nodes: int,
    in_use: Collection[Path] = (),
) -> None:
    """Refuse to swap to a disk that is too small.

    Args:
        model: The model, built already.
        settings: Without ``"auto"``.
        trains: Whether there is an optimizer; without one there are the parameters alone.
        local_world_size: Processes on this node.
        num_nodes: Nodes.
        in_use: Folders in which other engines have files.

    Raises:
        ConfigError: The disk has less room than will be written.
    """
    folders = nvme_folders(settings)
    if not folders or not _swaps(settings):
        return
    shape = measure(model, trains=trains)
    estimate = estimate_memory(shape, settings, num_processes=local_world_size, num_nodes=num_nodes)
    needed = estimate.nvme.total
    room, folder = min((_room(place, in_use), place) for place in folders)
    if needed > room:
        raise ConfigError(
            f"nvme_path={str(folder)!r} has too little room: DeepSpeed will write about "
            f"{format_bytes(needed)} ({needed} bytes) for {local_world_size} process(es), and "
            f"{format_bytes(room)} ({room} bytes) are free. A full disk ends the processes in "
            'mid-training. Make room, give another folder, or set the device to "cpu".'
        )


def _swaps(settings: Mapping[str, Any]) -> bool:
    return any(value_at(settings, f"{ZERO}.{name}.device") == "nvme" for name in _SECTIONS)


def _room(folder: Path, in_use: Collection[Path]) -> int:
    """What is free, and what an earlier run has left there, which will be overwritten."""
    old = () if folder in in_use else folder.glob("zero_stage_3/*/rank*/*.swp")
    return free_bytes(folder) + sum(path.stat().st_size for path in old)
