"""The host agent: one process per host, from which this host's workers are forked.

    relay ══ TCP ══► agent ── fork ──► worker, worker, …
                       │ copies of arenas and staging files, the workers' channels and pipes

It is to its host what the template process is to the notebook's machine: clean, with one thread and
everything imported. It is started by an engine (`plan.contracts.host_engine`), reads from its
standard input where to connect, and ends with the connection, with all its workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nbaccel.base import env
from nbaccel.base.ports import listen
from nbaccel.hosts import connecting, wire_frames
from nbaccel.hosts.channel_port import ChannelPort
from nbaccel.hosts.event_loop import EventLoop
from nbaccel.hosts.file_copies import ReceivedFiles, passing_frames, range_frames
from nbaccel.hosts.secure_link import FileBytes, SecureLink
from nbaccel.hosts.versions import own_versions
from nbaccel.plan import shared_memory_files
from nbaccel.plan.contracts.host_engine import HANDED_FILES_VARIABLE, AgentHello
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.topology import Topology
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template_server
from nbaccel.workers.reaping import end_descendants, end_group, reap
from nbaccel.workers.resource_use import process_use
from nbaccel.workers.worker import WorkerEnds, run_worker

__all__ = ["serve"]

_OUTPUT_WINDOW_BYTES = 1 << 18
"""Output of one pipe that the notebook has not been given yet: a worker waits beyond that."""
_PIPE_READ_BYTES = 1 << 16
_STREAM_NAMES = ("stdout", "stderr", "stack")


def serve(link: SecureLink, hello: AgentHello) -> NoReturn:
    """Serve until the connection ends, then end all that was started."""
    exit_status = 0
    try:
        _Agent(link, hello).loop()
    except SystemExit as exit_request:
        exit_status = int(exit_request.code or 0)
    except BaseException:  # the engine has the error stream, and shows its end
        exit_status = 1
        sys.excepthook(*sys.exc_info())
    finally:
        end_descendants()
        sys.stderr.flush()
        os._exit(exit_status)


@dataclass
class _Stream:
    """One pipe of a worker: its reading end is here."""

    read_end: int
    num_underway: int = 0
    """Bytes that the notebook has not been given yet."""
    is_empty: bool = False
    """Whether the last read found nothing."""

    @property
    def has_room(self) -> bool:
        return self.num_underway < _OUTPUT_WINDOW_BYTES


@dataclass
class _AgentWorker:
    """A worker of this host."""

    number: int
    pid: int
    port: ChannelPort
    streams: dict[int, _Stream]
    """By number: stdout, stderr, stack."""
    process_fd: int
    staging: dict[str, int] = field(default_factory=dict)
    """Key of an arena → number of its staging file."""
    held: deque[tuple[Any, bytes, list[int]]] = field(default_factory=deque)
    """Messages that wait for what was printed before them."""
    leftovers: set[Any] = field(default_factory=set)
    ended: messaging.Ended | None = None
    is_killed: bool = False

    @property
    def is_drained(self) -> bool:
        """Whether all that it has printed so far has been sent."""
        return all(stream.is_empty for number, stream in self.streams.items() if number < _STACK)


_STACK = _STREAM_NAMES.index("stack")


class _Agent:
    def __init__(self, link: SecureLink, hello: AgentHello) -> None:
        self._link = link
        self._events = EventLoop()
        self._workers: dict[int, _AgentWorker] = {}
        self._second_ports: dict[int, ChannelPort] = {}
        self._files = ReceivedFiles()
        self._handed: messaging.Channel | None = None
        self._handed_files: dict[str, int] = {}
        self._num_sent_files = 0
        self._store: socket.socket | None = None
        self._topologies: set[str] = set()
        self._is_over = False
        self._choose_interface()
        link.send(
            {
                "host": hello.host or env.read(hello.host_variable, "") or "",
                "versions": own_versions(),
                "inventory": inspect_machine().to_json(),
            }
        )
        self._events.on_readable(link.fileno(), self._read)

    def loop(self) -> None:
        """Serve until the connection ends."""
        while not self._is_over:
            self._write()
            self._events.run_once()
        self._forget_shared_memory()
        for worker in self._workers.values():
            _remove_leftovers(worker)

    # ---- the connection

    def _write(self) -> None:
        try:
            self._link.write()
        except OSError:
            self._is_over = True
            return
        self._events.on_writable(
            self._link.fileno(), self._write if self._link.wants_to_write else None
        )

    def _read(self) -> None:
        try:
            for frame in self._link.read():
                self._take(frame)
        except (EOFError, OSError):
            self._is_over = True

    def _take(self, frame: Any) -> None:
        if isinstance(frame, FileBytes):
            self._files.write(frame)
        else:
            _FRAME_TAKERS[type(frame)](self, frame)

    def _choose_interface(self) -> None:
        """Let workers meet over the network that leads to the notebook, unless told otherwise."""
        interface = connecting.interface_of(self._link.addresses()[0])
        env.update(
            {
                name: interface
                for name in connecting.INTERFACE_VARIABLES
                if interface and not env.read(name)
            }
        )

    # ---- getting ready

    def _on_welcome(self, frame: wire_frames.Welcome) -> None:
        template_server.import_for_workers(
            frame.device, in_notebook=frame.in_notebook, extends_torch=True
        )
        template_server.freeze_memory()
        self._link.send(wire_frames.AgentReady())

    def _on_ping(self, frame: wire_frames.Ping) -> None:
        self._link.send(wire_frames.Pong(frame.sent_at, time.monotonic()))

    def _on_bind_store(self, frame: wire_frames.BindStore) -> None:
        address = self._link.addresses()[0]
        if self._store is not None:
            self._store.close()
        try:
            self._store = listen(address, frame.port)
        except OSError as error:  # `PortTaken` is one
            self._link.send(wire_frames.StoreBound(address, 0, str(error)))
            return
        self._link.send(wire_frames.StoreBound(address, self._store.getsockname()[1]))

    # ---- workers

    def _on_fork(self, frame: wire_frames.ForkWorker) -> None:
        end, worker_end = messaging.Channel.pair()
        pipes = [os.pipe() for _ in _STREAM_NAMES]
        worker_ends = (worker_end.detach(), *(write_end for _, write_end in pipes))
        process_id = _fork_worker(worker_ends)
        memfd.close_all(worker_ends)
        number = frame.worker
        worker = _AgentWorker(
            number=number,
            pid=process_id,
            port=self._open_port(number, end.detach()),
            streams={
                stream_number: _Stream(read_end)
                for stream_number, (read_end, _) in enumerate(pipes)
            },
            process_fd=os.pidfd_open(process_id),
        )
        self._workers[number] = worker
        for stream_number, stream in worker.streams.items():
            os.set_blocking(stream.read_end, False)
            self._listen_to(worker, stream_number)
        self._events.on_readable(worker.process_fd, lambda: self._reap(worker))
        self._link.send(wire_frames.WorkerForked(number))

    def _on_signal(self, frame: wire_frames.SignalWorker) -> None:
        worker = self._workers.get(frame.worker)
        if worker is not None and worker.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, frame.signal)

    def _on_kill(self, frame: wire_frames.KillWorker) -> None:
        worker = self._workers.get(frame.worker)
        if worker is None:
            return
        worker.is_killed = True
        if worker.ended is None:
            end_group(worker.pid)
        else:
            self._finish(worker)

    def _on_poll(self, frame: wire_frames.PollWorkers) -> None:
        uses = [(worker.number, process_use(worker.pid)) for worker in self._workers.values()]
        self._link.send(
            wire_frames.WorkersSeen(tuple((number, use) for number, use in uses if use is not None))
        )

    def _reap(self, worker: _AgentWorker) -> None:
        worker.ended = reap(worker.pid)
        if worker.ended is None:
            return
        # What it has started and what has left its process group is this process's child now.
        end_descendants(
            kept_ids=[other.pid for other in self._workers.values() if other.ended is None]
        )
        self._events.forget(worker.process_fd)
        os.close(worker.process_fd)
        worker.port.read_rest()
        self._pump(worker)

    def _finish(self, worker: _AgentWorker) -> None:
        """Report a worker's end, once all it has printed and said has been sent."""
        is_sent = not worker.held and all(stream.is_empty for stream in worker.streams.values())
        if worker.ended is None or not (is_sent or worker.is_killed):
            return
        del self._workers[worker.number]
        _remove_leftovers(worker)
        worker.port.close()
        for stream in worker.streams.values():
            self._events.forget(stream.read_end)
            os.close(stream.read_end)
        for _, _, file_descriptors in worker.held:
            memfd.close_all(file_descriptors)
        self._link.send_in_order(iter([wire_frames.WorkerEnded(worker.number, worker.ended)]))

    # ---- what workers print

    def _listen_to(self, worker: _AgentWorker, number: int) -> None:
        stream = worker.streams[number]
        self._events.on_readable(
            stream.read_end, (lambda: self._pump(worker)) if stream.has_room else None
        )

    def _pump(self, worker: _AgentWorker) -> None:
        """Send what the worker has printed and said, as far as the notebook keeps up."""
        for number in tuple(worker.streams):
            self._pump_stream(worker, number)
        while worker.held and worker.is_drained:
            self._send_packet(worker, *worker.held.popleft())
        self._finish(worker)

    def _pump_stream(self, worker: _AgentWorker, number: int) -> None:
        stream = worker.streams[number]
        stream.is_empty = False
        while stream.has_room:
            try:
                content = os.read(stream.read_end, _PIPE_READ_BYTES)
            except BlockingIOError:
                stream.is_empty = True
                break
            self._link.send(wire_frames.Output(worker.number, number, content))
            if not content:
                self._events.forget(stream.read_end)
                os.close(stream.read_end)
                del worker.streams[number]
                return
            stream.num_underway += len(content)
        self._listen_to(worker, number)

    def _on_output_taken(self, frame: wire_frames.OutputTaken) -> None:
        worker = self._workers.get(frame.worker)
        stream = worker.streams.get(frame.stream) if worker else None
        if worker is not None and stream is not None:
            stream.num_underway -= frame.num_bytes
            if stream.has_room:
                self._pump(worker)

    # ---- what workers say

    def _open_port(self, number: int, fd: int) -> ChannelPort:
        return ChannelPort(
            self._events,
            fd,
            on_packet=lambda packet_bytes, file_descriptors: self._receive(
                number, packet_bytes, file_descriptors
            ),
            on_closed=lambda: self._link.send_in_order(iter([wire_frames.ChannelClosed(number)])),
            on_taken=lambda num_packets: self._link.send(
                wire_frames.PacketsTaken(number, num_packets)
            ),
        )

    def _receive(self, number: int, packet_bytes: bytes, file_descriptors: list[int]) -> None:
        worker = self._workers.get(number)
        if worker is None:  # a second channel: workers answer by the first one
            memfd.close_all(file_descriptors)
            return
        message = _peek(packet_bytes, file_descriptors)
        if isinstance(message, messaging.Leaves):
            # The folders are on this host's disks.
            if message.is_there:
                worker.leftovers.add(message.leftover)
            else:
                worker.leftovers.discard(message.leftover)
            memfd.close_all(file_descriptors)
            worker.port.taken(1)
        elif isinstance(message, (messaging.Interrupting, messaging.Whereabouts)):
            # They overtake what is printed: whoever stops a rank counts in tenths of seconds.
            self._link.send(wire_frames.Packet(channel=number, content=packet_bytes))
        else:
            worker.held.append((message, packet_bytes, file_descriptors))
            self._pump(worker)

    def _send_packet(
        self, worker: _AgentWorker, message: Any, packet_bytes: bytes, file_descriptors: list[int]
    ) -> None:
        sending: list[Iterator[Any]] = list(self._weight_frames(worker, message))
        attached = []
        for file_descriptor in file_descriptors:
            self._num_sent_files += 1
            number = 2 * self._num_sent_files + 1
            attached.append(wire_frames.FileCopy(number))
            sending.append(passing_frames(number, file_descriptor))
        packet = wire_frames.Packet(
            channel=worker.number, content=packet_bytes, attached=tuple(attached)
        )

        def all_frames() -> Iterator[Any]:
            for part in sending:
                yield from part
            yield packet

        self._link.send_in_order(all_frames())

    def _weight_frames(self, worker: _AgentWorker, message: Any) -> Iterator[Iterator[Any]]:
        """What the worker has written into staging files, by its own report."""
        report = getattr(message, "weight_report", None) or getattr(message, "report", None)
        for key, byte_ranges in report.own_bytes.items() if report is not None else ():
            number = worker.staging.get(key)
            if number is not None:
                yield range_frames(number, os.dup(self._files.descriptor(number)), byte_ranges)

    def _on_packet(self, frame: wire_frames.Packet) -> None:
        """Pass a message on to a worker."""
        worker = self._workers.get(frame.channel)
        port = worker.port if worker else self._second_ports.get(frame.channel)
        if port is None:
            self._link.send(wire_frames.PacketsTaken(frame.channel, 1))
            return
        if worker is not None:
            worker.staging.update(frame.staging)
        if frame.topology and frame.topology not in self._topologies:
            self._topologies.add(frame.topology)
            self._forget_shared_memory()
        port.put(frame.content, [self._descriptor(one) for one in frame.attached])

    def _descriptor(
        self, attached: wire_frames.FileCopy | wire_frames.SecondChannel | wire_frames.StoreListener
    ) -> int:
        """A new descriptor for what stands in a packet."""
        if isinstance(attached, wire_frames.FileCopy):
            return os.dup(self._files.descriptor(attached.number))
        if isinstance(attached, wire_frames.StoreListener):
            return os.dup(self._store.fileno() if self._store is not None else -1)
        end, worker_end = messaging.Channel.pair()
        self._second_ports[attached.number] = self._open_port(attached.number, end.detach())
        return worker_end.detach()

    def _on_packets_taken(self, frame: wire_frames.PacketsTaken) -> None:
        worker = self._workers.get(frame.channel)
        port = worker.port if worker else self._second_ports.get(frame.channel)
        if port is not None:
            port.taken(frame.num_packets)
        if worker is not None:
            self._pump(worker)

    def _on_channel_closed(self, frame: wire_frames.ChannelClosed) -> None:
        """The notebook has closed its end."""
        worker = self._workers.get(frame.channel)
        port = worker.port if worker else self._second_ports.pop(frame.channel, None)
        if port is not None:
            port.close()

    # ---- files

    def _on_new_file(self, frame: wire_frames.NewFile) -> None:
        if frame.ticket:
            self._files.adopt(frame.number, self._handed_file(frame.ticket))
        else:
            self._files.create(frame)

    def _handed_file(self, ticket: str) -> int:
        """A file that the engine has handed to this host; it is there before the notebook says."""
        if self._handed is None:
            self._handed = messaging.Channel.from_fd(int(env.read(HANDED_FILES_VARIABLE, "") or -1))
        while ticket not in self._handed_files:
            handed_ticket, file_descriptors = self._handed.receive_packet()
            self._handed_files[handed_ticket.decode()] = file_descriptors[0]
        return self._handed_files.pop(ticket)

    def _on_forget(self, frame: wire_frames.Forget) -> None:
        self._files.forget(frame.files)

    def _forget_shared_memory(self) -> None:
        """Remove what libraries leave in this host's shared memory for these workers."""
        worker_places = [Topology.from_json(topology) for topology in self._topologies]
        shared_memory_files.remove(worker_places)
        shared_memory_files.remove_orphans()


_FRAME_TAKERS: dict[type, Callable[[_Agent, Any], None]] = {
    wire_frames.Welcome: _Agent._on_welcome,
    wire_frames.Ping: _Agent._on_ping,
    wire_frames.BindStore: _Agent._on_bind_store,
    wire_frames.ForkWorker: _Agent._on_fork,
    wire_frames.SignalWorker: _Agent._on_signal,
    wire_frames.KillWorker: _Agent._on_kill,
    wire_frames.PollWorkers: _Agent._on_poll,
    wire_frames.OutputTaken: _Agent._on_output_taken,
    wire_frames.Packet: _Agent._on_packet,
    wire_frames.PacketsTaken: _Agent._on_packets_taken,
    wire_frames.ChannelClosed: _Agent._on_channel_closed,
    wire_frames.NewFile: _Agent._on_new_file,
    wire_frames.Forget: _Agent._on_forget,
}


def _fork_worker(worker_ends: tuple[int, ...]) -> int:
    """Fork a worker that has these ends and nothing else of this process's descriptors."""
    agent_id = os.getpid()
    process_id = os.fork()
    if process_id:
        return process_id
    # One that is left open would hide the end of another worker, or of this agent.
    for name in os.listdir("/proc/self/fd"):
        file_descriptor = int(name)
        if file_descriptor > 2 and file_descriptor not in worker_ends:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(file_descriptor)
    channel, stdout, stderr, stack = worker_ends
    return run_worker(
        WorkerEnds(channel=channel, stdout=stdout, stderr=stderr, stack=stack), agent_id
    )


def _peek(packet_bytes: bytes, file_descriptors: list[int]) -> Any:
    try:
        return messaging.peek_packet(packet_bytes, file_descriptors)
    except Exception:  # a class of a cell, which only the notebook and the worker have
        return None


def _remove_leftovers(worker: _AgentWorker) -> None:
    for folders in worker.leftovers:
        folders.remove()
