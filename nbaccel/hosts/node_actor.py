"""What runs on a node: an actor of Ray's, which has the node's workers forked from a template.

    notebook ══ Ray ══► NodeActor ── channel ──► template process ── fork ──► worker, worker, …
                           │ copies of arenas and staging files; the workers' channels and pipes

It is to its node what the notebook's process is to its own machine, and starts workers as that
does. It imports no torch, which takes seconds: its template does.

Seen in Ray 2.60: its workers block SIGINT, which children inherit; they set OMP_NUM_THREADS=1; a
method's arguments may come before those of an earlier call, as they are fetched by size.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from nbaccel.base import env
from nbaccel.base.leftovers import LeftoverFolders
from nbaccel.base.ports import listen
from nbaccel.hosts import node_messages
from nbaccel.hosts.versions import own_versions
from nbaccel.plan import shared_memory_files
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.topology import Topology
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template
from nbaccel.workers.messaging import Ended
from nbaccel.workers.resource_use import ProcessUse, process_use
from nbaccel.workers.template_starter import TemplateStarter
from nbaccel.workers.worker_handle import connect

__all__ = ["CONCURRENT_CALLS", "NodeActor"]

CONCURRENT_CALLS = 16
"""Methods of an actor that run at a time: one waits for events as long as it lives."""

_OUTBOX_BYTES = 16 << 20
"""What the notebook has not fetched yet: workers wait beyond that."""
_PIPE_BYTES = 1 << 20  # as `connect` makes them
_PIECE_BYTES = 8 << 20
_END_LOOK_S = 0.002
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which torch's process groups are told over which network to meet."""
# Ray sets them in its workers, for its own sake.
_RAYS_OWN_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")


class NodeActor:
    """A node of a launch or a pool. Its methods run in threads, several at a time."""

    def __init__(self) -> None:
        self._outbox = _Outbox()
        self._workers: dict[int, _NodeWorker] = {}
        self._second_channels: dict[int, messaging.Channel] = {}
        self._files: dict[int, int] = {}
        self._store: socket.socket | None = None
        self._topologies: set[str] = set()
        self._device = ""
        self._starter: TemplateStarter | None = None
        self._ends: dict[int, Ended] = {}
        self._taking = threading.Lock()
        self._num_taken = 0
        self._early: dict[int, list[Any]] = {}
        """Records of calls that came before an earlier one, by the call's number."""

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
        env.update(dict.fromkeys(_RAYS_OWN_VARIABLES) | interfaces)
        self._device = device
        _unblock_interrupts()
        if runs_cells:
            # Then its template has it, too; without it, the first cell says so.
            with contextlib.suppress(ImportError):
                importlib.import_module("IPython")
        template.template_for(device).start(in_background=False)
        return {
            "address": address,
            "versions": own_versions(),
            "inventory": inspect_machine().to_json(),
        }

    def get_ready(self) -> None:
        """Wait until workers can be forked."""
        self._template_starter()

    def clock(self) -> float:
        """What time it is here."""
        return time.monotonic()

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
        worker = _NodeWorker(number, self._template_starter(), self._outbox, self._end_of)
        self._workers[number] = worker
        worker.begin()

    def _template_starter(self) -> TemplateStarter:
        # It may start a template anew.
        _unblock_interrupts()
        if self._starter is None:
            self._starter = TemplateStarter(self._device)
        return self._starter

    def signal(self, number: int, signal_number: int) -> None:
        """Send a worker a signal."""
        self._workers[number].signal(signal_number)

    def kill(self, number: int) -> None:
        """End a worker with all that it has started."""
        self._workers[number].kill()

    def uses(self) -> list[tuple[int, ProcessUse]]:
        """What each worker uses."""
        found = [
            (number, process_use(worker.pid))
            for number, worker in tuple(self._workers.items())
            if not worker.has_ended
        ]
        return [(number, use) for number, use in found if use is not None]

    def remove_leftovers(self, leftovers: list[LeftoverFolders]) -> None:
        """Remove what a worker that was killed has left on this node's disks."""
        for folders in leftovers:
            folders.remove()

    def _end_of(self, pid: int) -> Ended:
        """How a worker has ended that is about to be reaped."""
        starter = self._template_starter()
        while pid not in self._ends:
            try:
                self._ends |= {ended.pid: ended for ended in starter.collect()}
            except Exception as error:  # the template has ended, and took its workers along
                return Ended(pid, -signal.SIGKILL, 0, str(error).partition("\n")[0])
            if pid not in self._ends:
                # The template is about to report it, or another worker's thread has read that.
                time.sleep(_END_LOOK_S)
        return self._ends[pid]

    # ---- to the notebook

    def events(self) -> list[Any]:
        """What has happened since the last call, in order; waits until something has."""
        return self._outbox.take()

    def read(self, number: int, ranges: Sequence[memfd.ByteRange]) -> list[Any]:
        """Bytes of a staging file, as arrays of uint8."""
        arrays = []
        for first_byte, end_byte in ranges:
            content = np.empty(end_byte - first_byte, dtype=np.uint8)
            memfd.read_at(self._files[number], memoryview(content.data), first_byte)
            arrays.append(content)
        return arrays

    # ---- from the notebook

    def take(self, number: int, records: list[Any]) -> None:
        """Take what the notebook sends, in the order of its calls' numbers."""
        with self._taking:
            self._early[number] = records
            while (due := self._early.pop(self._num_taken, None)) is not None:
                self._num_taken += 1
                for record in due:
                    self._take_record(record)

    def _take_record(self, record: Any) -> None:
        try:
            match record:
                case node_messages.NewFile():
                    self._files[record.number] = memfd.create_file(record.kind, record.num_bytes)
                case node_messages.FileBytes():
                    self._write_bytes(record)
                case node_messages.Forget():
                    memfd.close_all([self._files.pop(number) for number in record.files])
                case node_messages.Packet():
                    self._pass_on(record)
                case node_messages.ChannelClosed():
                    self._close_channel(record.channel)
        except Exception as error:  # nobody waits for this call: the notebook hears of it here
            self._outbox.put(node_messages.NodeFailed(f"{type(error).__name__}: {error}"))

    def _write_bytes(self, record: node_messages.FileBytes) -> None:
        import ray

        pieces = record.pieces
        if isinstance(pieces, ray.ObjectRef):
            pieces = ray.get(pieces)
        for first_byte, content in pieces:
            memfd.write_at(self._files[record.number], memoryview(content.data), first_byte)

    def _pass_on(self, packet: node_messages.Packet) -> None:
        worker = self._workers.get(packet.channel)
        channel = worker.channel if worker else self._second_channels.get(packet.channel)
        if channel is None:
            return
        if packet.topology and packet.topology not in self._topologies:
            self._topologies.add(packet.topology)
            self._forget_shared_memory()
        fds = [self._descriptor(one) for one in packet.attached]
        # It may have ended: its end is told elsewhere.
        with memfd.closing_files(*fds), contextlib.suppress(OSError):
            channel.send_packet(packet.content, fds)

    def _descriptor(
        self,
        attached: node_messages.FileCopy
        | node_messages.SecondChannel
        | node_messages.StoreListener,
    ) -> int:
        """A new descriptor for what stands in a packet."""
        if isinstance(attached, node_messages.FileCopy):
            return os.dup(self._files[attached.number])
        if isinstance(attached, node_messages.StoreListener):
            return os.dup(self._store.fileno() if self._store is not None else -1)
        end, worker_end = messaging.Channel.pair()
        # Nothing is read from it: workers answer by the first one.
        self._second_channels[attached.number] = end
        return worker_end.detach()

    def _close_channel(self, number: int) -> None:
        if number in self._workers:
            self._workers[number].hang_up()
        elif number in self._second_channels:
            self._second_channels.pop(number).close()

    def _forget_shared_memory(self) -> None:
        """Remove what libraries leave in this node's shared memory for these workers."""
        shared_memory_files.remove([Topology.from_json(one) for one in self._topologies])
        shared_memory_files.remove_orphans()


class _Outbox:
    """What the notebook is to fetch, in order; who adds too much of it waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: list[Any] = []
        self._num_bytes = 0

    def put(self, record: Any, num_bytes: int = 0) -> None:
        """Add a record."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < _OUTBOX_BYTES)
            self._records.append(record)
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def take(self) -> list[Any]:
        """All records, once there are some."""
        with self._changed:
            self._changed.wait_for(lambda: self._records)
            records = self._records
            self._records = []
            self._num_bytes = 0
            self._changed.notify_all()
        return records


class _NodeWorker:
    """A worker of this node, with a thread that passes on what it prints and says."""

    _file_numbers = itertools.count(1, 2)

    def __init__(
        self, number: int, starter: TemplateStarter, outbox: _Outbox, end_of: Callable[[int], Ended]
    ) -> None:
        self._number = number
        self._starter = starter
        self._outbox = outbox
        self._end_of = end_of
        self.channel, self._pipes, worker_ends = connect()
        with memfd.closing_files(*worker_ends.all()):
            self.pid = starter.start(worker_ends)
        self._exit = starter.sentinel(self.pid)
        self.has_ended = False
        self._is_heard = True

    def begin(self) -> None:
        """Pass on what it prints and says from now on."""
        threading.Thread(target=self._serve, daemon=True).start()

    def signal(self, signal_number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.has_ended:
            self._starter.signal(self.pid, signal_number)

    def kill(self) -> None:
        """End it with all that it has started."""
        if not self.has_ended:
            self._starter.kill(self.pid)

    def hang_up(self) -> None:
        """Let it read the end of its channel, of which the rest of what it says is still read."""
        with contextlib.suppress(OSError):
            self.channel.shut_down()

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
        self._outbox.put(node_messages.WorkerEnded(self._number, ended))
        self.channel.close()
        memfd.close_all([*self._pipes, self._exit])

    def _pass_on(self, *, is_readable: bool) -> None:
        packet = self._receive() if is_readable else None
        # After the packet has been read: what was printed before it goes first.
        self._pass_output()
        if packet is not None:
            self._pass_packet(*packet)

    def _receive(self) -> tuple[bytes, list[int]] | None:
        try:
            return self.channel.receive_packet()
        except EOFError:
            self._is_heard = False
            return None

    def _pass_output(self) -> None:
        """Pass on what it has printed so far."""
        for pipe, name in tuple(self._pipes.items()):
            num_bytes = 0
            # No more than a pipe holds: one that is never empty must not keep back what it says.
            while num_bytes < _PIPE_BYTES:
                try:
                    content = os.read(pipe, _PIPE_BYTES)
                except BlockingIOError:
                    break
                self._outbox.put(node_messages.Output(self._number, name, content), len(content))
                if not content:
                    del self._pipes[pipe]
                    os.close(pipe)
                    break
                num_bytes += len(content)

    def _pass_packet(self, content: bytes, fds: list[int]) -> None:
        numbers = []
        with memfd.closing_files(*fds):
            for fd in fds:
                number = next(self._file_numbers)
                numbers.append(number)
                num_bytes = os.fstat(fd).st_size
                self._outbox.put(node_messages.NewFile(number, "payload", num_bytes))
                for piece in _pieces(fd, num_bytes):
                    self._outbox.put(node_messages.FileBytes(number, [piece]), piece[1].nbytes)
        self._outbox.put(
            node_messages.Packet(
                channel=self._number,
                content=content,
                attached=tuple(node_messages.FileCopy(number) for number in numbers),
            ),
            len(content),
        )


def _pieces(fd: int, num_bytes: int) -> Iterator[tuple[int, Any]]:
    for first_byte in range(0, num_bytes, _PIECE_BYTES):
        content = np.empty(min(_PIECE_BYTES, num_bytes - first_byte), dtype=np.uint8)
        memfd.read_at(fd, memoryview(content.data), first_byte)
        yield first_byte, content


def _unblock_interrupts() -> None:
    """Let what this thread starts be interrupted, which Ray's workers block."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _interface_of(own_address: str) -> str:
    """The network interface with an address of this machine; empty if none has it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in addresses):
            return interface
    return ""
