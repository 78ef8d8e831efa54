"""Room in memory, in shared memory and on disk, and whether folders can be swapped to."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from nbaccel.base.atomic import free_bytes, nearest_folder
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig
from nbaccel.memory.estimate import MemoryEstimate
from nbaccel.plan import topology
from nbaccel.plan.inventory import Inventory


def shortage(num_workers: int) -> str:
    """What does not work because there is too little room; empty where there is enough."""
    if num_workers == 1 or topology.has_room(num_workers):
        return ""
    needed_text = format_bytes(num_workers * topology.FILE_BYTES)
    free_text = format_bytes(topology.free_shared_bytes())
    return (
        f"{topology.SHARED_MEMORY} is too small for DeepSpeed's shared memory: {num_workers} "
        f"workers need {needed_text} and {free_text} are free. Training works without it; "
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


def host_bytes(need: MemoryEstimate, device: str) -> int:
    """What the processes of this node will take of its memory."""
    # On a CPU the weights are there already, one copy for all until they are written to.
    on_device = need.device.total * need.num_processes if device == "cpu" else 0
    return need.host.total + on_device


def check_host_memory(need: MemoryEstimate, device: str, machine: Inventory) -> None:
    """Say before it happens that the system will kill processes for want of memory."""
    needed_bytes = host_bytes(need, device)
    text = (
        f"DeepSpeed will need about {format_bytes(needed_bytes)} of host memory for "
        f"{need.num_processes} process(es), and {format_bytes(machine.host_available_bytes)} of "
        f"{format_bytes(machine.host_total_bytes)} are free"
    )
    advice = (
        "Set zero_optimization.offload_optimizer.device (or offload_param.device) to 'none' or "
        "'nvme', a lower sub_group_size, or use fewer processes; nbaccel.advise finds what "
        "fits."
    )
    # What is free may grow until it is needed, so only a machine that is too small is refused.
    if needed_bytes > machine.host_total_bytes:
        raise ConfigError(f"{text}: the system would kill it at the start. {advice}")
    if needed_bytes > machine.host_available_bytes:
        warnings.warn(f"{text}: the system may kill it at the start. {advice}", stacklevel=2)


def check_disk(need: MemoryEstimate, in_use: Collection[Path] = ()) -> None:
    """Refuse to swap to a disk that is too small."""
    needed_bytes = need.nvme.total
    if not needed_bytes:
        return
    # Both folders may be on one disk: the whole need must fit on the fuller of the two.
    free_room, folder = min((_free_room(folder, in_use), folder) for folder in need.nvme_folders)
    if needed_bytes > free_room:
        raise ConfigError(
            f"nvme_path={str(folder)!r} has too little room: DeepSpeed will write about "
            f"{format_bytes(needed_bytes)} ({needed_bytes} bytes) for {need.num_processes} "
            f"process(es), and {format_bytes(free_room)} ({free_room} bytes) are free. A full disk "
            "ends the processes in the middle of the training. "
            'Make room, give another folder, or set the device to "cpu".'
        )


def _free_room(folder: Path, in_use: Collection[Path]) -> int:
    """What is free, and what an earlier run has left there, which will be overwritten."""
    overwritten = () if folder in in_use else folder.glob("zero_stage_3/*/rank*/*.swp")
    return free_bytes(folder) + sum(path.stat().st_size for path in overwritten)
