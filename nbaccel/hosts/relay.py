"""The relay: a process on the notebook's machine that makes workers of other hosts look local.

    notebook process              relay                                  agent, one per host
    ----------------              -----                                  -------------------
    WorkerHandle ── channel ────► ChannelPort   ══ Packet, files ═══════►  worker's channel
                 ◄─ pipes ─────── their writing ends ◄══ Output ═════════  worker's pipes
    RemoteStarter ─ channel ────► StartWorker, SignalWorker ════════════►  forks, sends signals
                 ◄─────────────── Forked, Ended ◄═══════════════════════   reaps

It is forked from the template like a worker, so it is there at once and ends with the notebook. Of
messages it reads what they mean for memory files (`messaging.FileHints`); times are converted from
the clock of a worker's host to that of the notebook's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from nbaccel.base.errors import InternalError
from nbaccel.hosts import relay_messages, wire_frames
from nbaccel.hosts.channel_port import ChannelPort
from nbaccel.hosts.door import Door
from nbaccel.hosts.event_loop import EventLoop
from nbaccel.hosts.file_copies import STAGING, ReceivedFiles, SentFiles
from nbaccel.hosts.secure_link import SILENCE_S, FileBytes, SecureLink
from nbaccel.hosts.versions import version_mismatch
from nbaccel.transfer import memfd
from nbaccel.workers import messaging

__all__ = ["serve_hosts"]

# No process has such a number (Linux: 2**22 at most), so none can be hit by mistake.
_FIRST_WORKER = 2**22 + 1
_NUM_PINGS = 5
_STREAMS = 3  # stdout, stderr, stack
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
_LOST_REMEDY = (
    "The machine was shut down, or the processes on it were killed. Launch again without it, or "
    "with max_restarts, which goes on with the hosts that are left."
)
_SILENT_REMEDY = (
    "The machine is down, or the network between it and this one. Workers that still run there end "
    "by themselves. Launch again without it, or with max_restarts, which goes on with the hosts "
    "that are left."
)


def serve_hosts(
    notebook_channel: messaging.Channel,
    serve_message: relay_messages.ServeHosts,
    file_descriptors: list[int],
    inherited: object,
) -> None:
    """Be the relay until the notebook hangs up."""
    (fd,) = file_descriptors
    relay = _Relay(notebook_channel, serve_message, socket.socket(fileno=fd))
    try:
        relay.loop()
    finally:
        relay.close()


class _Relay:
    def __init__(
        self,
        notebook_channel: messaging.Channel,
        serve_message: relay_messages.ServeHosts,
        listener: socket.socket,
    ) -> None:
        self._channel = notebook_channel
        self._settings = serve_message
        self._events = EventLoop()
        self._is_over = False
        self._numbers = itertools.count(_FIRST_WORKER)
        self._hosts: dict[str, _RemoteHost] = {}
        self._door = Door(self._events, listener, serve_message.token, self._admit)
        self._events.on_readable(notebook_channel.fileno(), self._read_notebook)

    def loop(self) -> None:
        """Pass on what comes, until the notebook hangs up."""
        while not self._is_over:
            self._events.run_once(self._door.due_in())
            self._door.close_silent()
            for host in list(self._hosts.values()):
                host.write()

    def close(self) -> None:
        """Hang up on all hosts: their agents end their workers."""
        self._door.close()
        for host in self._hosts.values():
            host.close()
        self._events.close()

    def say(self, message: object) -> None:
        """Tell the notebook something."""
        # It is gone: the loop is about to end.
        with contextlib.suppress(OSError):
            self._channel.send(message)

    # ---- hosts come and go

    def _admit(self, link: SecureLink) -> None:
        """An agent has proved that it knows the token."""
        _RemoteHost(self._events, link, self, self._numbers, self._settings)

    def join(self, host: _RemoteHost, name: str, mismatch: str) -> bool:
        """An agent has said which host it is on; returns whether it is accepted."""
        reason = mismatch
        if name not in self._settings.names:
            reason = f"it is none of {', '.join(self._settings.names)}"
        elif name in self._hosts:
            reason = "an agent for it has joined already"
        if reason:
            self.say(relay_messages.HostRefused(name, reason))
            return False
        self._hosts[name] = host
        if len(self._hosts) == len(self._settings.names):
            # All are here: the port is open for as long as it takes them to come.
            self._door.close()
        return True

    # ---- the notebook

    def _read_notebook(self) -> None:
        try:
            message, file_descriptors = self._channel.receive()
        except EOFError:
            self._is_over = True
            return
        if isinstance(message, relay_messages.StartWorker):
            self._start(message, file_descriptors)
        elif isinstance(message, relay_messages.FileCarried):
            for host in self._hosts.values():
                host.note_carried(file_descriptors[0], message.ticket)
            self.say(relay_messages.FileNoted(message.ticket))
            memfd.close_all(file_descriptors)
        elif isinstance(message, relay_messages.BindHostStore):
            self._hosts[message.host].link.send(wire_frames.BindStore(message.port))
        elif isinstance(message, relay_messages.SignalProcess):
            for host in self._hosts.values():
                host.signal(message.pid, message.signal)
        elif isinstance(message, relay_messages.KillProcess):
            for host in self._hosts.values():
                host.kill(message.pid)
        elif isinstance(message, relay_messages.AskUse):
            for host in self._hosts.values():
                host.ask_use()
        else:
            raise InternalError(f"the relay was sent {message!r}. Please report this.")

    def _start(self, message: relay_messages.StartWorker, file_descriptors: list[int]) -> None:
        number = next(self._numbers)
        host = self._hosts[message.host]
        host.start_worker(number, message.ticket, file_descriptors)
        if host.lost_because:
            host.report_lost_workers()


def _error_text(error: OSError) -> tuple[str, str]:
    """What an error of a connection says of the host, and what can be done."""
    error_text = str(error.strerror or error)
    if error.errno not in _SILENT:
        return error_text, _LOST_REMEDY
    return f"it has not answered for {SILENCE_S} s: {error_text}", _SILENT_REMEDY


class _RemoteWorker:
    """A worker of another host: the notebook's connections to it end here."""

    def __init__(
        self, number: int, ticket: int, pipes: list[int], port: ChannelPort, host: _RemoteHost
    ) -> None:
        self.number = number
        self.ticket = ticket
        self.port = port
        self._pipes: list[int | None] = list(pipes)
        self._host = host
        self._queue: deque[Callable[[], int | None]] = deque()
        """What is passed on, in order: each returns the descriptor that has no room, or None."""
        self._waits_for: int | None = None
        self.is_forked = self.is_killed = False
        for pipe_end in pipes:
            os.set_blocking(pipe_end, False)

    def put(self, step: Callable[[], int | None]) -> None:
        """Pass something on after everything before it."""
        self._queue.append(step)
        if self._waits_for is None:
            self.flush()

    def put_output(self, stream: int, content: bytes) -> None:
        """Pass on what it has printed; nothing closes the pipe."""
        unwritten = memoryview(content)

        def write_output() -> int | None:
            nonlocal unwritten
            pipe_end = self._pipes[stream]
            if pipe_end is None:
                return None
            if not content:
                self._close_pipe(stream)
                return None
            try:
                while unwritten:
                    num_written = os.write(pipe_end, unwritten)
                    unwritten = unwritten[num_written:]
                    self._host.link.send(wire_frames.OutputTaken(self.number, stream, num_written))
            except BlockingIOError:
                return pipe_end
            # The notebook reads no more: what is printed is dropped.
            except BrokenPipeError:
                self._close_pipe(stream)
                self._host.link.send(wire_frames.OutputTaken(self.number, stream, len(unwritten)))
            return None

        self.put(write_output)

    def flush(self) -> None:
        """Pass on what there is room for."""
        while self._queue:
            self._wait_for(self._queue[0]())
            if self._waits_for is not None:
                if not self.is_killed:
                    return
                # Nobody reads it any more: only its end matters.
                self._wait_for(None)
            # The last step closes everything, the queue too.
            if self._queue:
                self._queue.popleft()

    def _wait_for(self, file_descriptor: int | None) -> None:
        if self._waits_for == file_descriptor:
            return
        events = self._host.events
        if self._waits_for is not None:
            events.on_writable(self._waits_for, None)
        if file_descriptor is not None:
            events.on_writable(file_descriptor, self.flush)
        self._waits_for = file_descriptor

    def _close_pipe(self, stream: int) -> None:
        pipe_end = self._pipes[stream]
        if pipe_end is not None:
            if self._waits_for == pipe_end:
                self._wait_for(None)
            self._pipes[stream] = None
            os.close(pipe_end)

    def close(self) -> None:
        """Close the notebook's connections to it."""
        self._wait_for(None)
        self._queue.clear()
        self.port.close()
        for stream in range(_STREAMS):
            self._close_pipe(stream)


class _RemoteHost:
    """A host whose agent is connected."""

    def __init__(
        self,
        events: EventLoop,
        link: SecureLink,
        relay: _Relay,
        numbers: Iterator[int],
        settings: relay_messages.ServeHosts,
    ) -> None:
        self.events = events
        self.link = link
        self._relay = relay
        self._numbers = numbers
        self._settings = settings
        self.name = ""
        self._facts: dict[str, Any] = {}
        self.lost_because = self._lost_remedy = ""
        self._workers: dict[int, _RemoteWorker] = {}
        self._second_channels: dict[int, ChannelPort] = {}
        self._sent_files = SentFiles()
        self._received_files = ReceivedFiles()
        self._round_trips: list[tuple[float, float]] = []
        """Seconds that a ping took, and how far this host's clock is ahead of ours."""
        events.on_readable(link.fileno(), self._read)

    # ---- the connection

    def write(self) -> None:
        """Send what is waiting, as far as there is room."""
        if self.lost_because:
            return
        try:
            self.link.write()
        except OSError as error:
            self._lose(*_error_text(error))
            return
        self.events.on_writable(
            self.link.fileno(), self.write if self.link.wants_to_write else None
        )

    def _read(self) -> None:
        try:
            for frame in self.link.read():
                self._take(frame)
        except EOFError:
            self._lose("its agent has hung up")
        except OSError as error:
            self._lose(*_error_text(error))
        else:
            self.write()

    def _lose(self, reason: str, remedy: str = _LOST_REMEDY) -> None:
        """The connection is lost, and all workers with it."""
        if self.lost_because:
            return
        self.lost_because = reason
        self._lost_remedy = remedy
        self.events.forget(self.link.fileno())
        self.link.close()
        if self.name:
            self._relay.say(relay_messages.HostLost(self.name, reason))
        self.report_lost_workers()

    def report_lost_workers(self) -> None:
        """Report the ends of all workers that are left."""
        for number in list(self._workers):
            # Otherwise the notebook would wait for the fork first.
            self._on_forked(wire_frames.WorkerForked(number))
            because = f"host {self.name} was lost ({self.lost_because})"
            # SIGKILL, because that is how they end there: the agent takes them along.
            ended = messaging.Ended(number, -9, 0, because, self._lost_remedy)
            self._on_end(wire_frames.WorkerEnded(number, ended))

    def close(self) -> None:
        """Hang up."""
        if not self.lost_because:
            self.events.forget(self.link.fileno())
            self.link.close()
        for worker in self._workers.values():
            worker.close()
        for port in self._second_channels.values():
            port.close()
        self._sent_files.close()
        self._received_files.close()

    def _take(self, frame: Any) -> None:
        if isinstance(frame, FileBytes):
            self._take_piece(frame)
        elif isinstance(frame, dict):
            self._take_facts(frame)
        else:
            _TAKERS[type(frame)](self, frame)

    # ---- joining

    def _take_facts(self, facts: dict[str, Any]) -> None:
        mismatch = version_mismatch(facts["versions"])
        if not self._relay.join(self, facts["host"], mismatch):
            self._lose("refused")
            return
        self.name = facts["host"]
        self._facts = facts
        self.link.send(
            wire_frames.Welcome(
                device=self._settings.device, in_notebook=self._settings.in_notebook
            )
        )

    def _on_ready(self, frame: wire_frames.AgentReady) -> None:
        self.link.send(wire_frames.Ping(time.monotonic()))

    def _on_pong(self, frame: wire_frames.Pong) -> None:
        now = time.monotonic()
        took_s = now - frame.sent_at
        self._round_trips.append((took_s, frame.time - (frame.sent_at + took_s / 2)))
        if len(self._round_trips) < _NUM_PINGS:
            self.link.send(wire_frames.Ping(time.monotonic()))
            return
        self._relay.say(
            relay_messages.HostJoined(
                name=self.name,
                inventory=self._facts["inventory"],
                address=self.link.addresses()[1],
            )
        )

    def _on_store_bound(self, frame: wire_frames.StoreBound) -> None:
        self._relay.say(frame)

    # ---- workers

    def note_carried(self, file_descriptor: int, ticket: str) -> None:
        """See :meth:`SentFiles.note_carried`."""
        self._sent_files.note_carried(file_descriptor, ticket)

    def start_worker(self, number: int, ticket: int, file_descriptors: list[int]) -> None:
        """Have a worker forked."""
        fd, *pipes = file_descriptors
        port = self._open_port(number, fd)
        self._workers[number] = _RemoteWorker(number, ticket, pipes, port, self)
        self.link.send(wire_frames.ForkWorker(number))

    def signal(self, number: int, signal_number: int) -> None:
        """Send a worker a signal, if it is one of this host."""
        if number in self._workers and not self.lost_because:
            self.link.send(wire_frames.SignalWorker(number, signal_number))

    def kill(self, number: int) -> None:
        """End a worker, if it is one of this host."""
        worker = self._workers.get(number)
        if worker is not None and not self.lost_because:
            worker.is_killed = True
            worker.flush()
            self.link.send(wire_frames.KillWorker(number))

    def ask_use(self) -> None:
        """Let the host say what its workers use."""
        if self._workers and not self.lost_because:
            self.link.send(wire_frames.PollWorkers())

    def _on_workers_seen(self, frame: wire_frames.WorkersSeen) -> None:
        self._relay.say(relay_messages.UseKnown(frame.uses))

    def _on_forked(self, frame: wire_frames.WorkerForked) -> None:
        worker = self._workers[frame.worker]
        if not worker.is_forked:
            worker.is_forked = True
            self._relay.say(messaging.Forked(worker.ticket, frame.worker))

    def _on_output(self, frame: wire_frames.Output) -> None:
        worker = self._workers.get(frame.worker)
        if worker is not None:
            worker.put_output(frame.stream, frame.content)

    def _on_end(self, frame: wire_frames.WorkerEnded) -> None:
        worker = self._workers[frame.worker]
        ended = dataclasses.replace(frame.ended, pid=frame.worker)

        def report_end() -> None:
            del self._workers[worker.number]
            worker.close()
            self._relay.say(ended)

        worker.put(report_end)

    # ---- packets

    def _open_port(self, number: int, fd: int) -> ChannelPort:
        return ChannelPort(
            self.events,
            fd,
            on_packet=lambda packet_bytes, file_descriptors: self._send_packet(
                number, packet_bytes, file_descriptors
            ),
            on_closed=lambda: self.link.send_in_order(iter([wire_frames.ChannelClosed(number)])),
            on_taken=lambda num_packets: self.link.send(
                wire_frames.PacketsTaken(number, num_packets)
            ),
        )

    def _send_packet(self, number: int, packet_bytes: bytes, file_descriptors: list[int]) -> None:
        """Pass a message of the notebook on to a worker, with copies of its files."""
        message = messaging.peek_packet(packet_bytes, file_descriptors)
        hints = _hints_of(message)
        copying: list[Iterator[wire_frames.NewFile | FileBytes]] = []
        if hints.reads_arenas:
            copying.append(self._sent_files.changes())
        attached = [self._attach(file_descriptor, copying) for file_descriptor in file_descriptors]
        memfd.close_all(file_descriptors)
        file_numbers = [one.number for one in attached if isinstance(one, wire_frames.FileCopy)]
        staging_numbers = [
            file_number
            for file_number in file_numbers
            if self._sent_files.kind(file_number) == STAGING
        ]
        # Not strict: where nothing is brought home, no staging files come with it.
        self._sent_files.name_arenas(hints.arenas, file_numbers[: len(hints.arenas)])
        packet = wire_frames.Packet(
            channel=number,
            content=packet_bytes,
            attached=tuple(attached),
            staging=tuple(zip(hints.staging, staging_numbers, strict=False)),
            topology=_topology_of(message),
        )
        forgotten = self._sent_files.forget_arenas(hints.forgets)
        if hints.ends_staging:
            forgotten += self._sent_files.forget_staging()
        forgotten += self._sent_files.forget_old_payloads()
        self.link.send_in_order(
            itertools.chain(
                *copying, [packet], [wire_frames.Forget(forgotten)] if forgotten else []
            )
        )
        self.write()

    def _attach(
        self, file_descriptor: int, copying: list[Iterator[wire_frames.NewFile | FileBytes]]
    ) -> wire_frames.FileCopy | wire_frames.SecondChannel | wire_frames.StoreListener:
        """What stands for a descriptor on the other side."""
        if stat.S_ISREG(os.fstat(file_descriptor).st_mode):
            file_number, copy_frames = self._sent_files.share(file_descriptor)
            copying.append(copy_frames)
            return wire_frames.FileCopy(file_number)
        with socket.socket(fileno=os.dup(file_descriptor)) as attached_socket:
            if attached_socket.family != socket.AF_UNIX:
                return wire_frames.StoreListener()
            number = next(self._numbers)
            self._second_channels[number] = self._open_port(number, attached_socket.detach())
            return wire_frames.SecondChannel(number)

    def _on_packet(self, frame: wire_frames.Packet) -> None:
        """Pass a message of a worker on to the notebook, with its files."""
        file_descriptors = [
            self._received_files.take(one.number)
            for one in frame.attached
            if isinstance(one, wire_frames.FileCopy)
        ]
        packet_bytes, is_urgent = self._convert(frame.content, file_descriptors)
        worker = self._workers.get(frame.channel)
        if worker is None:
            memfd.close_all(file_descriptors)
            return
        if is_urgent and worker.port.try_put(packet_bytes, file_descriptors):
            return
        fd = worker.port.fileno()
        worker.put(lambda: None if worker.port.try_put(packet_bytes, file_descriptors) else fd)

    def _convert(self, packet_bytes: bytes, file_descriptors: list[int]) -> tuple[bytes, bool]:
        """The packet with its time in this machine's clock, and whether it overtakes output."""
        try:
            message = messaging.peek_packet(packet_bytes, file_descriptors)
        except Exception:  # a class that only the notebook has: what it says is the notebook's
            return packet_bytes, False
        if type(message) not in _TIMED_MESSAGES:
            return packet_bytes, isinstance(message, messaging.Whereabouts)
        ahead_s = min(self._round_trips)[1]
        changes: dict[str, Any] = {"time": message.time - ahead_s}
        if isinstance(message, messaging.Failed):
            record = message.record
            changes["record"] = dataclasses.replace(record, time=record.time - ahead_s)
        if packet_bytes[:1] == messaging.IN_FILE:
            os.close(file_descriptors.pop())
        packet_bytes, files = messaging.pack_message(dataclasses.replace(message, **changes))
        file_descriptors += files
        return packet_bytes, isinstance(message, messaging.Interrupting)

    def _on_packets_taken(self, frame: wire_frames.PacketsTaken) -> None:
        worker = self._workers.get(frame.channel)
        port = worker.port if worker else self._second_channels.get(frame.channel)
        if port is not None:
            port.taken(frame.num_packets)

    def _on_channel_closed(self, frame: wire_frames.ChannelClosed) -> None:
        # A worker's first channel is closed with its end, which is still to come.
        port = self._second_channels.pop(frame.channel, None)
        if port is not None:
            port.close()

    # ---- files

    def _on_new_file(self, frame: wire_frames.NewFile) -> None:
        self._received_files.create(frame)

    def _take_piece(self, piece: FileBytes) -> None:
        if self._received_files.holds(piece.file):
            self._received_files.write(piece)
        else:
            self._sent_files.take_home(piece)


_TIMED_MESSAGES = (
    messaging.Alive,
    messaging.Started,
    messaging.Metrics,
    messaging.Interrupting,
    messaging.Returned,
    messaging.Failed,
)
_TAKERS: dict[type, Callable[[_RemoteHost, Any], None]] = {
    wire_frames.AgentReady: _RemoteHost._on_ready,
    wire_frames.Pong: _RemoteHost._on_pong,
    wire_frames.StoreBound: _RemoteHost._on_store_bound,
    wire_frames.WorkerForked: _RemoteHost._on_forked,
    wire_frames.WorkersSeen: _RemoteHost._on_workers_seen,
    wire_frames.Output: _RemoteHost._on_output,
    wire_frames.WorkerEnded: _RemoteHost._on_end,
    wire_frames.Packet: _RemoteHost._on_packet,
    wire_frames.PacketsTaken: _RemoteHost._on_packets_taken,
    wire_frames.ChannelClosed: _RemoteHost._on_channel_closed,
    wire_frames.NewFile: _RemoteHost._on_new_file,
}


def _hints_of(message: Any) -> messaging.FileHints:
    """What a message means for files; a pool's task says it by its body."""
    for part in (message, getattr(message, "body", None)):
        file_hints = getattr(part, "file_hints", None)
        if file_hints is not None:
            hints: messaging.FileHints = file_hints()
            return hints
    return messaging.FileHints()


def _topology_of(message: Any) -> str:
    return getattr(message, "topology", "")
