"""The contract of whoever can start worker processes, here or on other hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nbaccel.plan.inventory import Inventory
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.reaping import end_group
from nbaccel.workers.resource_use import ProcessUse, process_use


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """The workers of a launch that run on one host.

    Attributes:
        name: The host, as messages name it.
        num_workers: How many; their ranks follow those of the host before.
        inventory: What the host has.
        devices: Numbers of the devices that its workers see; empty: all.
    """

    name: str
    num_workers: int
    inventory: Inventory
    devices: tuple[int, ...] = ()


class Starter(Protocol):
    """Starts workers and learns of their end."""

    name: str
    status: int | None
    """How the process that starts them has ended, if it is not this one and did so by itself."""

    shares: Sequence[HostShare]
    """The hosts that the workers run on, in the order of ranks; empty for this machine alone."""

    def start(self, ends: WorkerEnds) -> int:
        """Start a worker that owns these ends, in the order of ranks."""

    def signal(self, process_id: int, signal_number: int) -> None:
        """Send a worker a signal, unless it has ended."""

    def kill(self, process_id: int) -> None:
        """End a worker, with everything it has started that has not left its process group."""

    def use_of(self, process_id: int) -> ProcessUse | None:
        """What a worker uses, as far as it is known; None where nothing is, or it has gone.

        Never waits: for a worker on another host this is its host's last answer, and asks it.
        """

    def sentinel(self, process_id: int) -> int:
        """A new descriptor, readable once this worker may have ended; the caller closes it."""

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a worker may have ended."""

    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call, reaped."""

    def close(self) -> None:
        """No more workers will be started and all have ended."""


class LocalProcesses:
    """What starters of processes on this machine have in common."""

    shares: Sequence[HostShare] = ()

    def signal(self, process_id: int, signal_number: int) -> None:
        """See :meth:`Starter.signal`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal_number)

    def kill(self, process_id: int) -> None:
        """See :meth:`Starter.kill`."""
        end_group(process_id)

    def use_of(self, process_id: int) -> ProcessUse | None:
        """See :meth:`Starter.use_of`."""
        return process_use(process_id)

    def sentinel(self, process_id: int) -> int:
        """See :meth:`Starter.sentinel`."""
        try:
            return os.pidfd_open(process_id)
        except ProcessLookupError:
            # A pipe without a writer reads as ended, like the pidfd of a process that has ended.
            read_end, write_end = os.pipe()
            os.close(write_end)
            return read_end
