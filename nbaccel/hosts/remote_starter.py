"""Workers on other hosts, as the notebook starts them: through the actors of Ray's there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nbaccel.hosts.node_links import NodeLink, NodeLinks
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.resource_use import ProcessUse
from nbaccel.workers.start_method import HostShare, Starter

__all__ = ["RemoteStarter"]


class RemoteStarter(Starter):
    """Starts workers on hosts that have joined."""

    def __init__(self, links: NodeLinks, shares: Sequence[HostShare]) -> None:
        self.shares = shares
        self._links = links
        self._places = [share.name for share in shares for _ in range(share.num_workers)]
        self._link_of: dict[int, NodeLink] = {}

    def start(self, ends: WorkerEnds) -> int:
        """Start a worker on the next host that has room; returns a number for it."""
        link = self._links.named(self._places[len(self._link_of)])
        number = self._links.start_worker(link, ends)
        self._link_of[number] = link
        return number

    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call."""
        return [ended for ended in self._links.collect() if ended.pid in self._link_of]

    def sentinel(self, pid: int) -> int:
        """A descriptor that is readable when any worker has ended."""
        return os.dup(self._links.fileno())

    def signal(self, pid: int, number: int) -> None:
        """Have its host send a worker a signal."""
        self._link_of[pid].signal(pid, number)

    def kill(self, pid: int) -> None:
        """Have its host end a worker."""
        self._link_of[pid].kill(pid)

    def use_of(self, pid: int) -> ProcessUse | None:
        """Its host's last answer."""
        link = self._link_of[pid]
        link.ask_use()
        return link.uses.get(pid)
