"""The contract of whoever can start worker processes, here or on other hosts."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

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


class Starter(abc.ABC):
    """Starts workers and learns of their end. What is not abstract is that of this machine.

    Attributes:
        shares: The hosts that the workers run on, in the order of ranks; empty for this machine.
        status: How the process that starts them has ended, if it is not this one and did so by
            itself.
    """

    shares: Sequence[HostShare] = ()
    status: int | None = None

    @abc.abstractmethod
    def start(self, ends: WorkerEnds) -> int:
        """Start a worker that owns these ends, in the order of ranks; returns its process id."""

    @abc.abstractmethod
    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call, reaped."""

    def sentinel(self, pid: int) -> int:
        """A new descriptor, readable once this worker may have ended; the caller closes it."""
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            # A pipe without a writer reads as ended, like the pidfd of a process that has ended.
            read_end, write_end = os.pipe()
            os.close(write_end)
            return read_end

    def signal(self, pid: int, number: int) -> None:
        """Send a worker a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill(self, pid: int) -> None:
        """End a worker, with everything it has started that has not left its process group."""
        end_group(pid)

    def use_of(self, pid: int) -> ProcessUse | None:
        """What a worker uses, as far as it is known; None where nothing is, or it has gone.

        Never waits: for a worker on another host this is its host's last answer, and asks it.
        """
        return process_use(pid)

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """No more workers will be started and all have ended."""
