"""Room for DeepSpeed's shared memory and swap files, and whether folders can be swapped to."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nbaccel.base.disk import free_bytes, nearest_folder
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig
from nbaccel.deepspeed.zero_memory import estimate_memory
from nbaccel.memory.model_size import measure
from nbaccel.plan import shared_memory_files as shared_memory

if TYPE_CHECKING:
    from torch import nn


def shortage(num_workers: int) -> str:
    """What does not work because there is too little room; empty where there is enough."""
    if num_workers == 1 or shared_memory.has_room(num_workers):
        return ""
    needed_text = format_bytes(num_workers * shared_memory.FILE_BYTES)
    free_text = format_bytes(shared_memory.free_shared_bytes())
    return (
        f"{shared_memory.FOLDER} is too small for DeepSpeed's shared memory: {num_workers} workers "
        f"need {needed_text} and {free_text} are free. Training works without it; "
        "deepspeed.comm.inference_all_reduce would crash the worker. Enlarge it (docker run "
        "--shm-size=1g), or use fewer workers."
    )


_OFFLOAD_SECTIONS = ("offload_optimizer", "offload_param")


def folder_mistakes(zero_config: ZeroConfig) -> Iterator[str]:
    """Why a folder that is to be swapped to cannot be used, found by writing there."""
    for section_name in _OFFLOAD_SECTIONS:
        section = getattr(zero_config, section_name)
        file_path = section.nvme_path if section is not None and section.device == "nvme" else None
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
        parent = nearest_folder(swap_folder)
        if not parent.is_dir():
            return f"{str(parent)!r} is a file"
        # By writing: permissions alone do not tell of a file system that is read-only or full.
        with tempfile.TemporaryFile(dir=parent) as file:
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
    """Refuse to swap to a disk that is too small."""
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
