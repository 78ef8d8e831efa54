"""Shared memory and swap files of DeepSpeed's workers: whether there is room, and none left behind.

    name    /dev/shm/deepspeed_allreduce_buffer_<user>_<MASTER_ADDR>_<MASTER_PORT>_<rank>
    size    66 MiB for each rank
    made    in `init_distributed`, where LOCAL_SIZE says that all ranks are on this machine

Without LOCAL_SIZE the first ``inference_all_reduce`` of a CPU worker crashes it (a null pointer);
with it DeepSpeed leaves the files there for ever. So workers get it where there is room, and the
files are removed when the workers have ended. Nothing here imports DeepSpeed.

DeepSpeed writes to the files from C++: where there is no room, the process ends by a signal.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbaccel.base.disk import free_bytes, nearest_folder
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.deepspeed.field_types import AUTO
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig
from nbaccel.deepspeed.zero_memory import estimate_memory
from nbaccel.memory.model_size import measure
from nbaccel.plan.topology import Topology

if TYPE_CHECKING:
    from torch import nn


__all__ = [
    "check_room",
    "folder_mistakes",
    "has_room",
    "remove",
    "remove_orphans",
    "shortage",
    "variables",
]


FOLDER = Path("/dev/shm")  # noqa: S108 - DeepSpeed chooses the name
FILE_BYTES = (66 << 20) + 4096
_SEGMENT_PREFIX = "deepspeed_allreduce_buffer_"
_MIN_AGE_S = 60.0
"""A younger file may be one that its workers are just opening, in another container."""


def variables(worker_place: Topology, device: str) -> dict[str, str]:
    """The variable that tells DeepSpeed that its ranks share a machine.

    Args:
        worker_place: A worker's place.
        device: Type of the device.

    Returns:
        Its name and value; nothing for a worker that is alone, which has nothing to add up.
    """
    process_count = worker_place.local_world_size
    if process_count == 1:
        return {}
    # Only ranks on CPUs of one machine make the files. "0" and not unset, because a variable of the
    # notebook's own would be inherited.
    is_enough = device != "cpu" or worker_place.num_nodes > 1 or has_room(process_count)
    return {"LOCAL_SIZE": str(process_count) if is_enough else "0"}


def has_room(num_workers: int) -> bool:
    """Whether the shared memory of so many workers fits."""
    return _free_bytes() >= num_workers * FILE_BYTES


def shortage(num_workers: int) -> str:
    """What does not work because there is too little room; empty where there is enough.

    Args:
        num_workers: Workers on this machine.
    """
    if num_workers == 1 or has_room(num_workers):
        return ""
    needed_text = format_bytes(num_workers * FILE_BYTES)
    free_text = format_bytes(_free_bytes())
    return (
        f"{FOLDER} is too small for DeepSpeed's shared memory: {num_workers} workers need "
        f"{needed_text} and {free_text} are free. Training works without it; "
        "deepspeed.comm.inference_all_reduce would crash the worker. Enlarge it (docker run "
        "--shm-size=1g), or use fewer workers."
    )


def remove(worker_places: Iterable[Topology]) -> None:
    """Remove the files of workers that have ended, or that are about to be started.

    Args:
        worker_places: Their places. A file that is there before they start is of others that had
            the same port, and would be taken for theirs.
    """
    for worker_place in worker_places:
        words = (worker_place.master_addr, worker_place.master_port, worker_place.rank)
        name = "_".join(map(str, (f"{_SEGMENT_PREFIX}{os.getuid()}", *words)))
        # Most often there is none.
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def remove_orphans() -> None:
    """Remove the user's files of this kind that no process has open.

    They are of launches whose notebook was killed before it could remove them.
    """
    old_files = [
        path for path in _segment_files() if time.time() - path.stat().st_mtime > _MIN_AGE_S
    ]
    if not old_files:
        return
    # Once for all files: it reads the memory maps of every process.
    names = _mapped_segments()
    for path in old_files:
        if str(path) not in names:
            with contextlib.suppress(OSError):
                path.unlink()


def _segment_files() -> Sequence[Path]:
    try:
        return [*FOLDER.glob(f"{_SEGMENT_PREFIX}{os.getuid()}_*")]
    except OSError:
        return []


def _mapped_segments() -> frozenset[str]:
    """Files of this kind that are mapped by any process whose maps can be read."""
    return frozenset(
        file_path
        for maps_path in Path("/proc").glob("[0-9]*/maps")
        for file_path in _segment_names(maps_path)
    )


def _segment_names(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for line in path.read_text().splitlines():
            if _SEGMENT_PREFIX in line:
                # The sixth field is the path, which may have blanks.
                yield line.split(maxsplit=5)[5]


def _free_bytes() -> int:
    try:
        file_system = os.statvfs(FOLDER)
    except OSError:
        return 0
    return file_system.f_bavail * file_system.f_frsize


_OFFLOAD_SECTIONS = ("offload_optimizer", "offload_param")


def folder_mistakes(zero_config: ZeroConfig) -> Iterator[str]:
    """Why a folder that is to be swapped to cannot be used, found by writing there.

    Args:
        zero_config: The configuration.

    Yields:
        A message each.
    """
    for section_name in _OFFLOAD_SECTIONS:
        offload_section = getattr(zero_config, section_name)
        file_path = (
            offload_section.nvme_path
            if offload_section is not None and offload_section.device == "nvme"
            else None
        )
        if not file_path or file_path == AUTO:
            continue
        folder_problem = _folder_problem(Path(file_path))
        if folder_problem:
            yield (
                f"{ZERO}.{section_name}.nvme_path={file_path!r} cannot be used: {folder_problem}. "
                "DeepSpeed would fail in every process when it makes its engine. Give a folder on "
                "a local disk that you may write to."
            )


def _folder_problem(swap_folder: Path) -> str:
    try:
        nearest_parent = nearest_folder(swap_folder)
        if not nearest_parent.is_dir():
            return f"{str(nearest_parent)!r} is a file"
        # By writing: permissions alone do not tell of a file system that is read-only or full.
        with tempfile.TemporaryFile(dir=nearest_parent) as file:
            file.write(b"nbaccel")
            file.flush()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def check_room(
    model: nn.Module,
    zero_config: ZeroConfig,
    *,
    is_training: bool,
    local_world_size: int,
    num_nodes: int,
    in_use: Collection[Path] = (),
) -> None:
    """Refuse to swap to a disk that is too small.

    Args:
        model: The model, built already.
        zero_config: Without ``"auto"``.
        is_training: Whether there is an optimizer; without one there are the parameters alone.
        local_world_size: Processes on this node.
        num_nodes: Nodes.
        in_use: Folders in which other engines have files.

    Raises:
        ConfigError: The disk has less room than will be written.
    """
    offload_sections = (zero_config.offload_optimizer, zero_config.offload_param)
    swap_folders = [
        Path(offload_section.nvme_path)
        for offload_section in offload_sections
        if offload_section and offload_section.nvme_path
    ]
    if not swap_folders or not any(
        offload_section and offload_section.device == "nvme" for offload_section in offload_sections
    ):
        return
    shape = measure(model, trains=is_training)
    memory_estimate = estimate_memory(
        shape, zero_config, num_processes=local_world_size, num_nodes=num_nodes
    )
    needed_bytes = memory_estimate.nvme.total
    # Both folders may be on one disk: the whole need must fit on the fuller of the two.
    free_room, swap_folder = min(
        (_free_room(room_folder, in_use), room_folder) for room_folder in swap_folders
    )
    if needed_bytes > free_room:
        raise ConfigError(
            f"nvme_path={str(swap_folder)!r} has too little room: DeepSpeed will write about "
            f"{format_bytes(needed_bytes)} ({needed_bytes} bytes) for {local_world_size} "
            f"process(es), and {format_bytes(free_room)} ({free_room} bytes) are free. A full disk "
            "ends the processes in the middle of the training. "
            'Make room, give another folder, or set the device to "cpu".'
        )


def _free_room(swap_folder: Path, in_use: Collection[Path]) -> int:
    """What is free, and what an earlier run has left there, which will be overwritten."""
    old_folder = () if swap_folder in in_use else swap_folder.glob("zero_stage_3/*/rank*/*.swp")
    return free_bytes(swap_folder) + sum(path.stat().st_size for path in old_folder)
