"""What a process uses of its machine, looked up from outside by its number.

A module of its own, because a launch of one process needs it, and nothing that imports numpy.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses: bytes in its machine's memory, and seconds of processor time so far."""

    rss_bytes: int
    cpu_s: float


def process_use(pid: int) -> ProcessUse | None:
    """What a process of this machine uses now; None for one that has gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUse(
                rss_bytes=int(process.memory_info().rss), cpu_s=float(times.user + times.system)
            )
    return None
