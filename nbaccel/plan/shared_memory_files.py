"""Shared memory that DeepSpeed makes in workers: the variable for it, and none left behind.

    name    /dev/shm/deepspeed_allreduce_buffer_<user>_<MASTER_ADDR>_<MASTER_PORT>_<rank>
    size    66 MiB for each rank
    made    in `init_distributed`, where LOCAL_SIZE says that all ranks are on this machine

Without LOCAL_SIZE the first ``inference_all_reduce`` of a CPU worker crashes it (a null pointer);
with it DeepSpeed leaves the files there for ever. So workers get it where there is room, and the
files are removed when the workers have ended. Every launch of several does so: any function may use
DeepSpeed.

DeepSpeed writes to the files from C++: where there is no room, the process ends by a signal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nbaccel.config.capabilities import device_row
from nbaccel.plan.topology import Topology

FOLDER = Path("/dev/shm")  # noqa: S108 - DeepSpeed chooses the name
FILE_BYTES = (66 << 20) + 4096
_SEGMENT_PREFIX = "deepspeed_allreduce_buffer_"
_MIN_AGE_S = 60.0
"""A younger file may be one that its workers are just opening, in another container."""


def variables(place: Topology, device: str) -> dict[str, str]:
    """The variable that tells DeepSpeed that its ranks share a machine."""
    process_count = place.local_world_size
    if process_count == 1:
        return {}
    # Only ranks on CPUs of one machine make the files. "0" and not unset, because a variable of the
    # notebook's own would be inherited.
    is_enough = (
        not device_row(device).in_host_memory or place.num_nodes > 1 or has_room(process_count)
    )
    return {"LOCAL_SIZE": str(process_count) if is_enough else "0"}


def has_room(num_workers: int) -> bool:
    """Whether the shared memory of so many workers fits."""
    return free_shared_bytes() >= num_workers * FILE_BYTES


def remove(worker_places: Iterable[Topology]) -> None:
    """Remove the files of workers that have ended, or that are about to be started."""
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


def free_shared_bytes() -> int:
    """Free bytes of the file system that shared memory is in; 0 where there is none."""
    try:
        system = os.statvfs(FOLDER)
    except OSError:
        return 0
    return system.f_bavail * system.f_frsize
