"""What runs on a node: an actor of Ray's, which has the node's workers forked from a template.

    notebook ══ Ray ══► NodeActor ── channel ──► template process ── fork ──► worker, worker, …
                           │ copies of arenas and staging files; the workers' channels and pipes

    notebook ──► files, Packet                             `NodeActor.take`
             ◄── what workers print and say, their ends    `NodeActor.events`

A *worker* is named by a number that the notebook gives it.

It starts workers as the notebook does, and imports no torch (seconds), which its template does.

Seen in Ray 2.60: its workers block SIGINT, which children inherit; they set OMP_NUM_THREADS=1; of
calls that run at a time a later one may begin first, unless it waits for an earlier one's result.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil

from nbaccel.base import env
from nbaccel.base.atomic import LeftoverFolders
from nbaccel.base.processes import ProcessUse, listen, process_use
from nbaccel.hosts.ray_host import OWN_PATH
from nbaccel.plan import topology
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.topology import Topology
from nbaccel.transfer import memfd
from nbaccel.workers import template
from nbaccel.workers.messaging import Ended
from nbaccel.workers.worker_processes import TemplateStarter, connect

_CONCURRENT_CALLS = 16
"""Methods of an actor that run at a time: one waits for events as long as it lives."""
_OUTBOX_EVENTS = 32
"""What the notebook has not fetched yet, of a megabyte at most: workers wait beyond that."""
_PART_BYTES = 32 << 20  # of weights
_PIPE_BYTES = 1 << 20  # as `connect` makes them
# Ray sets them in its workers, for its own sake.
_RAYS_OWN_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")


FileContent = tuple[int, str, int, Any]
"""Bytes of a memory file of the notebook's: its number, which may be new, its kind and size, and
its pieces as (first byte, array of uint8), or Ray's reference to a list of such; the rest is 0."""


Packet = tuple[int, bytes, tuple[int | None, ...], Topology | None]
"""A packet for a worker's channel: the worker, what `workers.messaging` has packed, the numbers of
its files (None for the socket on which the node listens), and the place that it assigns, if any."""
Event = tuple[str, tuple[Any, ...]]
"""A method of the notebook's `NodeLink`, and what it is given. Of a worker its end comes last."""


class NodeActor:
    """A node of a launch or a pool. Its methods run in threads, several at a time."""

    def __init__(self) -> None:
        self._outbox: queue.Queue[Event] = queue.Queue(_OUTBOX_EVENTS)
        self._workers: dict[int, _NodeWorker] = {}
        self._files: dict[int, int] = {}
        self._store = socket.socket()
        self._places: set[Topology] = set()
        self._device = ""
        self._starter: TemplateStarter | None = None

    def join(self, device: str, *, runs_cells: bool) -> dict[str, Any]:
        """Start the template, and say what this node has."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        entries = (
            (name, entry.address.partition("%")[0])
            for name, own_addresses in psutil.net_if_addrs().items()
            for entry in own_addresses
        )
        interface = next((name for name, own_address in entries if own_address == address), "")
        # Workers meet over the network of this cluster, unless told otherwise.
        names = topology.INTERFACE_VARIABLES if interface else ()
        interfaces = {name: interface for name in names if not env.read(name)}
        variables: dict[str, str | None] = {**dict.fromkeys(_RAYS_OWN_VARIABLES), **interfaces}
        if OWN_PATH in sys.path:
            sys.path.remove(OWN_PATH)
            rest = (env.read("PYTHONPATH") or "").removeprefix(OWN_PATH)
            variables["PYTHONPATH"] = rest.removeprefix(os.pathsep)
        env.update(variables)
        self._device = device
        _unblock_interrupts()
        if runs_cells:
            # Then its template has it, too; without it, the first cell says so.
            with contextlib.suppress(ImportError):
                importlib.import_module("IPython")
        template.template_for(device).start()
        return {"address": address, "versions": own_versions(), "inventory": inspect_machine()}

    def get_ready(self) -> None:
        """Wait until workers can be forked."""
        self._template_starter()

    def bind_store(self, address: str, port: int | None) -> tuple[int, str]:
        """Listen for the rendezvous store, whose server a worker here will be; or say why not."""
        self._store.close()
        try:
            self._store = listen(address, port)
        except OSError as error:  # `PortTaken` is one
            return 0, str(error)
        return self._store.getsockname()[1], ""

    def leave(self) -> None:
        """End the template with all workers, and what they would leave in memory."""
        template.stop()
        self._forget_shared_memory()

    def fork(self, number: int) -> None:
        self._workers[number] = _NodeWorker(number, self._template_starter(), self._outbox)

    def _template_starter(self) -> TemplateStarter:
        # It may start a template anew.
        _unblock_interrupts()
        if self._starter is None:
            self._starter = TemplateStarter(self._device)
        return self._starter

    def act_on(self, number: int, method: str, *arguments: Any) -> None:
        """Do something to a worker that a `Starter` can do, unless it has ended."""
        worker = self._workers[number]
        if not worker.has_ended:
            getattr(self._template_starter(), method)(worker.pid, *arguments)

    def uses(self) -> list[tuple[int, ProcessUse]]:
        return [
            (number, use)
            for number, worker in tuple(self._workers.items())
            if not worker.has_ended and (use := process_use(worker.pid)) is not None
        ]

    def remove_leftovers(self, leftovers: list[LeftoverFolders]) -> None:
        """Remove what a worker that was killed has left on this node's disks."""
        for folders in leftovers:
            folders.remove()

    def events(self) -> list[Event]:
        """What has happened since the last call, in order; waits until something has."""
        events = [self._outbox.get()]
        return events + [self._outbox.get() for _ in range(self._outbox.qsize())]

    def read(self, number: int, ranges: list[memfd.ByteRange]) -> Iterator[list[tuple[int, Any]]]:
        """Bytes of a staging file, in parts: lists of first byte, array of uint8."""
        part: list[tuple[int, Any]] = []
        num_bytes = 0
        for start, end in memfd.pieces(ranges, _PART_BYTES):
            part.append((start, _bytes_of(self._files[number], start, end)))
            num_bytes += end - start
            if num_bytes >= _PART_BYTES:
                yield part
                part, num_bytes = [], 0
        yield part

    def take(
        self, files: list[FileContent], packet: Packet | None, forgotten: list[int], _after: None
    ) -> None:
        """Take what the notebook sends, after the call whose end it hands in."""
        import ray

        try:
            for number, kind, num_bytes, given in files:
                if number not in self._files:
                    self._files[number] = memfd.create_file(kind, num_bytes)
                pieces = ray.get(given) if isinstance(given, ray.ObjectRef) else given
                for first_byte, content in pieces:
                    memfd.write_at(self._files[number], memoryview(content.data), first_byte)
            if packet is not None:
                self._pass_on(*packet)
            memfd.close_all([self._files.pop(number) for number in forgotten])
        except Exception as error:  # nobody waits for this call: the notebook hears of it here
            self._outbox.put(("lose", (f"{type(error).__name__}: {error}",)))

    def _pass_on(
        self, number: int, content: bytes, attached: Sequence[int | None], place: Topology | None
    ) -> None:
        if place is not None and place not in self._places:
            self._places.add(place)
            self._forget_shared_memory()
        files = [self._store.fileno() if file is None else self._files[file] for file in attached]
        fds = list(map(os.dup, files))
        # It may have ended: its end is told elsewhere.
        with memfd.closing_files(*fds), contextlib.suppress(OSError):
            self._workers[number].channel.send_packet(content, fds)

    def _forget_shared_memory(self) -> None:
        """Remove what libraries leave in this node's shared memory for these workers."""
        topology.remove_shared_memory(self._places)
        topology.remove_orphans()


def own_versions() -> dict[str, str]:
    """Versions of this machine, by what has them."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # Without the build (`+cu130`): the same model trains on CPUs here and on GPUs there.
        "torch": version("torch").partition("+")[0],
        # The package itself may not be imported from below.
        "nbaccel": sys.modules["nbaccel"].__version__,
    }


def start_actor(**options: Any) -> Any:
    """Have Ray start an actor where its options say; returns Ray's handle of it."""
    import ray

    return ray.remote(NodeActor).options(max_concurrency=_CONCURRENT_CALLS, **options).remote()


class _NodeWorker:
    """A worker of this node, with a thread that passes on what it prints and says."""

    def __init__(self, number: int, starter: TemplateStarter, outbox: queue.Queue[Event]) -> None:
        self._number = number
        self._starter = starter
        self._outbox = outbox
        self.channel, self._pipes, worker_ends = connect()
        with memfd.closing_files(*worker_ends):
            self.pid = starter.start(worker_ends)
        self._exit = starter.sentinel(self.pid)
        self.has_ended = False
        self._is_heard = True
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            channel_fds = [self.channel.fileno()] if self._is_heard else []
            readable, _, _ = select.select([*self._pipes, self._exit, *channel_fds], [], [])
            if self._exit in readable:
                break
            self._pass_on(is_readable=self.channel.fileno() in readable)
        ended = self._starter.end_of(self.pid) or Ended(self.pid, -signal.SIGKILL, 0)
        self.has_ended = True
        while self._is_heard and select.select([self.channel], [], [], 0)[0]:
            self._pass_on(is_readable=True)
        self._pass_on(is_readable=False)
        self._tell("worker_ended", ended)
        self.channel.close()
        memfd.close_all([*self._pipes, self._exit])

    def _pass_on(self, *, is_readable: bool) -> None:
        content = b""
        fds: list[int] = []
        if is_readable:
            try:
                content, fds = self.channel.receive_packet()
            except EOFError:
                self._is_heard = False
        # After the packet has been read: what was printed before it goes first.
        for pipe, name in tuple(self._pipes.items()):
            with contextlib.suppress(BlockingIOError):
                # No more than a pipe holds: one that prints on and on must not keep back the rest.
                printed = os.read(pipe, _PIPE_BYTES)
                self._tell("worker_printed", name, printed)
                if not printed:
                    del self._pipes[pipe]
                    os.close(pipe)
        if content:
            with memfd.closing_files(*fds):
                files = tuple(_bytes_of(fd, 0, os.fstat(fd).st_size) for fd in fds)
            self._tell("worker_said", content, files)

    def _tell(self, method: str, *arguments: Any) -> None:
        self._outbox.put((method, (self._number, *arguments)))


def _bytes_of(fd: int, start: int, end: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if start == end:  # what a worker sends may be no file
        return np.empty(0, np.uint8)
    return np.fromfile(f"/proc/self/fd/{fd}", np.uint8, end - start, offset=start)


def _unblock_interrupts() -> None:
    """Let what this thread starts be interrupted, which Ray's workers block."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
