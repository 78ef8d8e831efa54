"""What workers have in memory, by process id: looked at from outside, so that none is disturbed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil

from nbaccel.plan.gpus import Meter

__all__ = ["Scales", "resident"]


class Scales:
    """Weighs workers.

    Args:
        uses_gpus: Whether they may hold memory of GPUs. The driver is asked for it, which needs no
            CUDA context in this process.
    """

    def __init__(self, *, uses_gpus: bool) -> None:
        self._uses_gpus = uses_gpus
        self._meter: Meter | None = None

    def on_gpus(self, pids: Sequence[int]) -> dict[int, int]:
        """Process id → bytes on GPUs, of those of these processes that the driver knows.

        In a container it may know them by other numbers; then a worker's own word has to do.
        """
        if not self._uses_gpus:
            return {}
        self._meter = self._meter or Meter.open()
        if self._meter is None:
            self._uses_gpus = False
            return {}
        held = self._meter.read()
        return {pid: held[pid] for pid in pids if pid in held}

    def close(self) -> None:
        """Let go of the driver."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None


def resident(pid: int) -> int:
    """Bytes that a process has in the machine's memory; 0 for one that has gone."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
