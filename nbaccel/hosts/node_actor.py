"""What runs on a node: an actor of Ray's, which has the node's workers forked from a template.

    notebook ══ Ray ══► NodeActor ── channel ──► template process ── fork ──► worker, worker, …
                           │ copies of arenas and staging files; the workers' channels and pipes

    notebook ──► files, Packet                             `NodeActor.take`
             ◄── Output, Packet, WorkerEnded, an error     `NodeActor.events`

A *worker* is named by a number that the notebook gives it.

It is to its node what the notebook's process is to its own machine, and starts workers as that
does. It imports no torch, which takes seconds: its template does.

Seen in Ray 2.60: its workers block SIGINT, which children inherit; they set OMP_NUM_THREADS=1; of
calls that run at a time a later one may begin first, unless it waits for an earlier one's result.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import platform
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil

from nbaccel.base import env
from nbaccel.base.leftovers import LeftoverFolders
from nbaccel.base.processes import ProcessUse, listen, process_use
from nbaccel.hosts.ray_host import OWN_PATH
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.topology import Topology, remove_orphans, remove_shared_memory
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template
from nbaccel.workers.messaging import Ended
from nbaccel.workers.worker_processes import TemplateStarter, connect

_CONCURRENT_CALLS = 16
"""Methods of an actor that run at a time: one waits for events as long as it lives."""
_OUTBOX_RECORDS = 32
"""What the notebook has not fetched yet, of a megabyte at most: workers wait beyond that."""
_PIPE_BYTES = 1 << 20  # as `connect` makes them
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which torch's process groups are told over which network to meet."""
# Ray sets them in its workers, for its own sake.
_RAYS_OWN_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")


FileContent = tuple[int, str, int, Any]
"""Bytes of a memory file of the notebook's: its number, which may be new, its kind and size, and
its pieces as (first byte, array of uint8), or Ray's reference to a list of such. The rest is zero.
"""


class NodeEnd(enum.Enum):
    """What stands in the place of a descriptor that is none of a file."""

    SECOND_CHANNEL = "the worker's end of a second channel"
    STORE = "the socket on which the node listens for the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A packet of a worker's channel, as `workers.messaging` packs it."""

    worker: int
    is_second: bool = False
    """Whether it goes by the worker's second channel."""
    content: bytes
    attached: tuple[Any, ...] = ()
    """For its descriptors: numbers of files, or a `NodeEnd`; of files that come from a node their
    bytes, as arrays of uint8."""
    topology: str = ""
    """The worker's place, if the message assigns it one."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a worker has written to one of its pipes."""

    worker: int
    stream: str
    content: bytes


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker is gone, and all that it has printed and said was sent before."""

    worker: int
    ended: Ended


class NodeActor:
    """A node of a launch or a pool. Its methods run in threads, several at a time."""

    def __init__(self) -> None:
        self._outbox: queue.Queue[Any] = queue.Queue(_OUTBOX_RECORDS)
        self._workers: dict[int, _NodeWorker] = {}
        self._files: dict[int, int] = {}
        self._store: socket.socket | None = None
        self._topologies: set[str] = set()
        self._device = ""
        self._starter: TemplateStarter | None = None

    # ---- getting ready

    def join(self, device: str, *, runs_cells: bool) -> dict[str, Any]:
        """Start the template, and say what this node has."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        interface = _interface_of(address)
        # Workers meet over the network of this cluster, unless told otherwise.
        interfaces = {
            name: interface for name in _INTERFACE_VARIABLES if interface and not env.read(name)
        }
        variables: dict[str, str | None] = {**dict.fromkeys(_RAYS_OWN_VARIABLES), **interfaces}
        if OWN_PATH in sys.path:
            sys.path.remove(OWN_PATH)
            variables["PYTHONPATH"] = os.pathsep.join(
                place
                for place in (env.read("PYTHONPATH") or "").split(os.pathsep)
                if place != OWN_PATH
            )
        env.update(variables)
        self._device = device
        _unblock_interrupts()
        if runs_cells:
            # Then its template has it, too; without it, the first cell says so.
            with contextlib.suppress(ImportError):
                importlib.import_module("IPython")
        template.template_for(device).start()
        return {
            "address": address,
            "versions": own_versions(),
            "inventory": inspect_machine().to_json(),
        }

    def get_ready(self) -> None:
        """Wait until workers can be forked."""
        self._template_starter()

    def bind_store(self, address: str, port: int | None) -> tuple[int, str]:
        """Listen for the rendezvous store, whose server a worker here will be; or say why not."""
        if self._store is not None:
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

    # ---- workers

    def fork(self, number: int) -> None:
        """Have a worker forked."""
        self._workers[number] = _NodeWorker(
            number, self._template_starter(), self._outbox, self._end_of
        )

    def _template_starter(self) -> TemplateStarter:
        # It may start a template anew.
        _unblock_interrupts()
        if self._starter is None:
            self._starter = TemplateStarter(self._device)
        return self._starter

    def signal(self, number: int, signal_number: int) -> None:
        """Send a worker a signal, unless it has ended."""
        worker = self._workers[number]
        if not worker.has_ended:
            self._template_starter().signal(worker.pid, signal_number)

    def kill(self, number: int) -> None:
        """End a worker with all that it has started."""
        worker = self._workers[number]
        if not worker.has_ended:
            self._template_starter().kill(worker.pid)

    def uses(self) -> list[tuple[int, ProcessUse]]:
        """What each worker uses."""
        return [
            (number, use)
            for number, worker in tuple(self._workers.items())
            if not worker.has_ended and (use := process_use(worker.pid)) is not None
        ]

    def remove_leftovers(self, leftovers: list[LeftoverFolders]) -> None:
        """Remove what a worker that was killed has left on this node's disks."""
        for folders in leftovers:
            folders.remove()

    def _end_of(self, pid: int) -> Ended:
        """How a worker has ended whose end was reported."""
        try:
            ended = self._template_starter().end_of(pid)
        except Exception as error:  # the template has ended, and took its workers along
            return Ended(pid, -signal.SIGKILL, 0, str(error).partition("\n")[0])
        return ended or Ended(pid, -signal.SIGKILL, 0)

    # ---- to the notebook

    def events(self) -> list[Any]:
        """What has happened since the last call, in order; waits until something has."""
        records = [self._outbox.get()]
        return records + [self._outbox.get() for _ in range(self._outbox.qsize())]

    def read(self, number: int, ranges: Sequence[memfd.ByteRange]) -> list[Any]:
        """Bytes of a staging file, as arrays of uint8."""
        return [_bytes_of(self._files[number], byte_range) for byte_range in ranges]

    # ---- from the notebook

    def take(
        self,
        files: list[FileContent],
        packet: Packet | None,
        forgotten: list[int],
        _after: None,
    ) -> None:
        """Take what the notebook sends, after the call whose end it hands in."""
        try:
            for file in files:
                self._write_file(*file)
            if packet is not None:
                self._pass_on(packet)
            memfd.close_all([self._files.pop(number) for number in forgotten])
        except Exception as error:  # nobody waits for this call: the notebook hears of it here
            self._outbox.put(error)

    def _write_file(self, number: int, kind: str, num_bytes: int, pieces: Any) -> None:
        import ray

        if number not in self._files:
            self._files[number] = memfd.create_file(kind, num_bytes)
        if isinstance(pieces, ray.ObjectRef):
            pieces = ray.get(pieces)
        for first_byte, content in pieces:
            memfd.write_at(self._files[number], memoryview(content.data), first_byte)

    def _pass_on(self, packet: Packet) -> None:
        worker = self._workers[packet.worker]
        if packet.topology and packet.topology not in self._topologies:
            self._topologies.add(packet.topology)
            self._forget_shared_memory()
        fds = [self._descriptor(worker, one) for one in packet.attached]
        channel = worker.second_channel if packet.is_second else worker.channel
        # It may have ended: its end is told elsewhere.
        with memfd.closing_files(*fds), contextlib.suppress(OSError):
            channel.send_packet(packet.content, fds)

    def _descriptor(self, worker: _NodeWorker, attached: int | NodeEnd) -> int:
        """A new descriptor for what stands in a packet."""
        if attached is NodeEnd.STORE:
            return os.dup(self._store.fileno() if self._store is not None else -1)
        if attached is NodeEnd.SECOND_CHANNEL:
            # Nothing is read from it: workers answer by the first one.
            worker.second_channel, worker_end = messaging.Channel.pair()
            return worker_end.detach()
        return os.dup(self._files[attached])

    def _forget_shared_memory(self) -> None:
        """Remove what libraries leave in this node's shared memory for these workers."""
        remove_shared_memory([Topology.from_json(one) for one in self._topologies])
        remove_orphans()


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

    def __init__(
        self,
        number: int,
        starter: TemplateStarter,
        outbox: queue.Queue[Any],
        end_of: Callable[[int], Ended],
    ) -> None:
        self._number = number
        self._outbox = outbox
        self._end_of = end_of
        self.channel, self._pipes, worker_ends = connect()
        self.second_channel = self.channel
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
        ended = self._end_of(self.pid)
        self.has_ended = True
        while self._is_heard and select.select([self.channel], [], [], 0)[0]:
            self._pass_on(is_readable=True)
        self._pass_on(is_readable=False)
        self._outbox.put(WorkerEnded(self._number, ended))
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
        self._pass_output()
        if content:
            with memfd.closing_files(*fds):
                files = tuple(_bytes_of(fd, (0, os.fstat(fd).st_size)) for fd in fds)
            self._outbox.put(Packet(worker=self._number, content=content, attached=files))

    def _pass_output(self) -> None:
        """Pass on what it has printed so far."""
        for pipe, name in tuple(self._pipes.items()):
            with contextlib.suppress(BlockingIOError):
                # All that the pipe holds, and no more: a worker that prints on and on must not keep
                # back what it says.
                content = os.read(pipe, _PIPE_BYTES)
                self._outbox.put(Output(self._number, name, content))
                if not content:
                    del self._pipes[pipe]
                    os.close(pipe)


def _bytes_of(fd: int, byte_range: memfd.ByteRange) -> np.ndarray[Any, np.dtype[np.uint8]]:
    first_byte, end_byte = byte_range
    content = np.empty(end_byte - first_byte, dtype=np.uint8)
    memfd.read_at(fd, memoryview(content.data), first_byte)
    return content


def _unblock_interrupts() -> None:
    """Let what this thread starts be interrupted, which Ray's workers block."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _interface_of(own_address: str) -> str:
    """The network interface with an address of this machine; empty if none has it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in addresses):
            return interface
    return ""
