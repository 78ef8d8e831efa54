"""Workers on other hosts, as the notebook starts them: through the actors of Ray's there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nbaccel.hosts.node_links import NodeLink, NodeLinks
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.resource_use import ProcessUse
from nbaccel.workers.start_method import HostShare

__all__ = ["RemoteStarter"]


class RemoteStarter:
    """Starts workers on hosts that have joined. See `start_method.Starter`."""

    name = "hosts"
    status: int | None = None

    def __init__(self, links: NodeLinks, shares: Sequence[HostShare]) -> None:
        self.shares = shares
        self._links = links
        self._places = [share.name for share in shares for _ in range(share.num_workers)]
        self._link_of: dict[int, NodeLink] = {}

    def start(self, ends: WorkerEnds) -> int:
        """See :meth:`Starter.start`."""
        link = self._links.named(self._places[len(self._link_of)])
        number = self._links.start_worker(link, ends)
        self._link_of[number] = link
        return number

    def sentinels(self) -> Sequence[int]:
        """A descriptor that is readable when a worker has ended."""
        return [self._links.fileno()]

    def sentinel(self, process_id: int) -> int:
        """See :meth:`Starter.sentinel`: readable when any worker has ended."""
        return os.dup(self._links.fileno())

    def collect(self) -> Sequence[Ended]:
        """See :meth:`Starter.collect`."""
        return [ended for ended in self._links.collect() if ended.pid in self._link_of]

    def signal(self, process_id: int, signal_number: int) -> None:
        """See :meth:`Starter.signal`."""
        self._link_of[process_id].signal(process_id, signal_number)

    def kill(self, process_id: int) -> None:
        """See :meth:`Starter.kill`."""
        self._link_of[process_id].kill(process_id)

    def use_of(self, process_id: int) -> ProcessUse | None:
        """See :meth:`Starter.use_of`."""
        link = self._link_of[process_id]
        link.ask_use()
        return link.uses.get(process_id)

    def close(self) -> None:
        """All have ended; the connections stay their session's."""
