"""The shared memory through which DeepSpeed's CPU workers add up tensors for inference.

    name    /dev/shm/deepspeed_allreduce_buffer_<user>_<MASTER_ADDR>_<MASTER_PORT>_<rank>
    size    66 MiB for each rank
    made    in `init_distributed`, where LOCAL_SIZE says that all ranks are on this machine

Without LOCAL_SIZE the first ``inference_all_reduce`` of a CPU worker ends it (a null pointer); with
it DeepSpeed leaves the files there for ever. So workers get it where there is room, and the files
go when the workers have ended. Nothing here imports DeepSpeed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nbaccel.topology import Topology
from nbaccel.units import format_bytes

__all__ = ["has_room", "remove", "remove_orphans", "shortage", "variables"]

FOLDER = Path("/dev/shm")  # noqa: S108 - DeepSpeed chooses the name
FILE_BYTES = (66 << 20) + 4096
_PREFIX = "deepspeed_allreduce_buffer_"
_MIN_AGE_S = 60.0
"""A younger file may be one that its workers are just opening, in another container."""


def variables(place: Topology, device: str) -> dict[str, str]:
    """The variable by which DeepSpeed knows that its ranks share a machine.

    Args:
        place: A worker's place.
        device: Type of the device.

    Returns:
        Its name and value; nothing for a worker that is alone, which adds up nothing.
    """
    count = place.local_world_size
    if count == 1:
        return {}
    fits = device != "cpu" or place.num_nodes > 1 or has_room(count)
    return {"LOCAL_SIZE": str(count) if fits else "0"}


def has_room(num_workers: int) -> bool:
    """Whether the shared memory of so many workers fits."""
    return _free_bytes() >= num_workers * FILE_BYTES


def shortage(num_workers: int) -> str:
    """What does not work for want of room; empty where there is enough.

    Args:
        num_workers: Workers on this machine.
    """
    if num_workers == 1 or has_room(num_workers):
        return ""
    needed, free = format_bytes(num_workers * FILE_BYTES), format_bytes(_free_bytes())
    return (
        f"{FOLDER} is too small for DeepSpeed's shared memory: {num_workers} workers need {needed} "
        f"and {free} are free. Training works without it; deepspeed.comm.inference_all_reduce "
        "would crash the worker. Enlarge it (docker run --shm-size=1g), or use fewer workers."
    )


def remove(places: Iterable[Topology]) -> None:
    """Remove the files of workers that have ended, or that are about to be started.

    Args:
        places: Their places. A file that is there before they start is of others that had the
            same port, and would be taken for theirs.
    """
    for place in places:
        name = f"{_PREFIX}{os.getuid()}_{place.master_addr}_{place.master_port}_{place.rank}"
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def remove_orphans() -> None:
    """Remove the user's files of this kind that no process has open.

    They are of launches whose notebook was killed, which nobody could clean up after.
    """
    old = [path for path in _files() if time.time() - path.stat().st_mtime > _MIN_AGE_S]
    if not old:
        return
    mapped = _mapped()
    for path in old:
        if str(path) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()


def _files() -> Sequence[Path]:
    try:
        return [*FOLDER.glob(f"{_PREFIX}{os.getuid()}_*")]
    except OSError:
        return []


def _mapped() -> frozenset[str]:
    """Files of this kind that are in the memory of any process that we may look at."""
    return frozenset(path for maps in Path("/proc").glob("[0-9]*/maps") for path in _names(maps))


def _names(maps: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for line in maps.read_text().splitlines():
            if _PREFIX in line:
                yield line.split(maxsplit=5)[5]


def _free_bytes() -> int:
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
