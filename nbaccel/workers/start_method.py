"""The contract of whoever can start worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbaccel.workers.messaging import Ended
from nbaccel.workers.worker import WorkerEnds


class Starter(Protocol):
    """Starts workers and learns of their end."""

    name: str
    status: int | None
    """How the process that starts them has ended, if it is not this one and did so by itself."""

    def start(self, ends: WorkerEnds) -> int:
        """Start a worker that owns these ends; returns its process id."""

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a worker may have ended."""

    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call, reaped."""

    def close(self) -> None:
        """No more workers will be started and all have ended."""
