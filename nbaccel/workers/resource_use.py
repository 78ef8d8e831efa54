"""What a process uses of its machine, looked up from outside by its number."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

__all__ = ["ProcessUse", "process_use"]


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses.

    Attributes:
        rss_bytes: Bytes that it has in the machine's memory.
        cpu_s: Seconds of processor time that it has had.
    """

    rss_bytes: int
    cpu_s: float


def process_use(process_id: int) -> ProcessUse | None:
    """What a process of this machine uses now; None for one that has gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(process_id)
        with process.oneshot():
            cpu_times = process.cpu_times()
            return ProcessUse(
                rss_bytes=int(process.memory_info().rss),
                cpu_s=float(cpu_times.user + cpu_times.system),
            )
    return None
