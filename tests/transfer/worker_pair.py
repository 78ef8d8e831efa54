"""A notebook and its workers in one process: two dicts, and what flows between them.

The worker's side maps the arenas privately, as in a process of its own. Only what cloudpickle keeps
per process, its table of classes, is shared: classes of cells are tried with a real worker.
"""

from __future__ import annotations

import gc
import textwrap
from typing import Any

from nbaccel.calls.launch import staged
from nbaccel.transfer.arena import Sharing
from nbaccel.transfer.free_names import Names, names_of
from nbaccel.transfer.memfd import closing_files
from nbaccel.transfer.namespace_sync import NamespaceSync, PreparedUpdate
from nbaccel.transfer.pickling import unpack
from nbaccel.transfer.received_modules import ReceivedModules
from nbaccel.transfer.worker_namespace import Namespace


def run(text: str, namespace: dict[str, Any]) -> None:
    """Run a cell's code in a namespace."""
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), namespace)


class Worker:
    """One rank's side."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ns: dict[str, Any] = {"__name__": "__main__"}
        self.namespace = Namespace(self.ns, ReceivedModules(rank=rank), rank, "cpu")

    def mappings(self) -> list[Any]:
        return list(self.namespace.modules.mappings.values())

    def written(self) -> list[Any]:
        return [span for mapping in self.mappings() for span in mapping.written()]

    def pull(self, *names: str, into: dict[str, Any]) -> dict[str, Any]:
        box, fd = self.namespace.pack(names)
        with closing_files(fd):
            return unpack(box, fd, {}, namespace=into)


class Pair:
    """A notebook with one or more workers, who run cells as the pool does."""

    def __init__(self, ranks: int = 1, **values: Any) -> None:
        self.ns: dict[str, Any] = {"__name__": "__main__", **values}
        self.flow = NamespaceSync(self.ns, range(ranks))
        self.workers = [Worker(rank) for rank in range(ranks)]

    @property
    def worker(self) -> dict[str, Any]:
        return self.workers[0].ns

    def notebook(self, text: str) -> None:
        """Run a cell in the notebook itself."""
        run(text, self.ns)

    def send(self, names: Names, *ranks: int, force: bool = False) -> PreparedUpdate | None:
        """Bring names to workers; the closed shipment is given back to look at."""
        ranks = ranks or tuple(worker.rank for worker in self.workers)
        shipment = self.flow.prepare(names, ranks, force_send=force)
        if shipment is None:
            return None
        try:
            for part in shipment.parts:
                for rank in part.ranks:
                    self.workers[rank].namespace.take(part.message, part.fds)
            self.flow.taken(shipment)
        finally:
            shipment.close()
        return shipment

    def need(self, *names: str, force: bool = False) -> tuple[str, ...]:
        """Bring these names to all workers; which were sent."""
        shipment = self.send(Names(frozenset(names)), force=force)
        return tuple(shipment.parts[0].tokens) if shipment else ()

    def cell(self, text: str, *ranks: int) -> PreparedUpdate | None:
        """Run a cell in the workers, with all that belongs to it."""
        ranks = ranks or tuple(worker.rank for worker in self.workers)
        text = textwrap.dedent(text)
        shipment = self.send(names_of(text), *ranks)
        for rank in ranks:
            namespace = self.workers[rank].namespace
            namespace.begin()
            run(text, self.workers[rank].ns)
            self.flow.bound(rank, namespace.bound())
        self.home(*ranks)
        return shipment

    def close(self) -> None:
        """Let go of all memory."""
        self.ns.clear()
        for worker in self.workers:
            worker.ns.clear()
        self.workers.clear()
        del self.flow
        gc.collect()

    def home(self, *ranks: int) -> list[Any]:
        """Let the notebook have the weights, as the pool does after a cell."""
        workers = [worker for worker in self.workers if not ranks or worker.rank in ranks]
        records = self.flow.records({key for w in workers for key in w.namespace.modules.dirty()})
        sharing = Sharing.joined(record.sharing for record in records)
        with staged(sharing, sharing.arenas) as weight_receiver:
            staging = weight_receiver.staging
            written = [worker.namespace.modules.write_changed(staging) for worker in workers]
            reports = [report for report, _ in written]
            with self.flow.taking_weights(records):
                weight_receiver.apply(
                    reports, {k: fd for _, whole in written for k, fd in whole.items()}
                )
        for worker in workers:
            worker.namespace.modules.share_equal_pages()
        return reports
