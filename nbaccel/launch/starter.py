"""The contract of whoever can start worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nbaccel.launch.wire import Ended
from nbaccel.launch.worker import Ends


class Starter(Protocol):
    """Starts workers and learns of their end."""

    name: str

    def start(self, ends: Ends) -> int:
        """Start a worker that owns these ends; returns its process id."""

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a worker may have ended."""

    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call, reaped."""

    def close(self) -> None:
        """No more workers will be started and all have ended."""
