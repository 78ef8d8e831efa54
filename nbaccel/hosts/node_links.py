"""The notebook's side of its nodes: what makes workers of other machines look local.

    WorkerHandle ── channel ──► reader thread  ══ NodeActor.take ═════►  worker's channel
                 ◄─ pipes ───── thread of the  ◄═ NodeActor.events ════  worker's pipes, channel
                 ◄─ channel ─── node
    RemoteStarter ────────────► NodeActor.fork, signal, kill ═════════►  template, system
                 ◄─ ended ───── thread of the node

Of messages it reads what they mean for memory files (`messaging.FileHints`, reports of weights),
and converts times from the clock of a worker's node to that of the notebook's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nbaccel.base.errors import StartupFailed
from nbaccel.base.leftovers import LeftoverFolders
from nbaccel.base.units import shorten_text
from nbaccel.hosts import node_messages
from nbaccel.hosts.shared_files import MESSAGE, SharedFiles, file_kind
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.resource_use import ProcessUse

__all__ = ["NodeLink", "NodeLinks", "error_line"]

# No process has such a number (Linux: 2**22 at most), so none can be hit by mistake.
_FIRST_WORKER = 2**22 + 1
_NUM_PINGS = 5
_LOOK_S = 0.1
_USE_S = 0.5
"""Between questions for what workers use: a dashboard looks once a second, for all ranks."""
_HOME_BYTES = 32 << 20
"""Weights that are fetched by one call; the next one is under way meanwhile."""
_LEAVE_S = 3.0
_LOST_REMEDY = (
    "The machine was shut down, the processes on it were killed, or the network between it and "
    "this one is gone. Launch again without it, or with max_restarts, which goes on with the hosts "
    "that are left."
)
_TIMED_MESSAGES = (messaging.Metrics, messaging.Failed)


class _RemoteWorker:
    """A worker of a node: the ends of its connections that a worker of this machine would have."""

    def __init__(self, number: int, ends: WorkerEnds) -> None:
        self.number = number
        self.channel = messaging.Channel.from_fd(os.dup(ends.channel), waits=False)
        self.pipes = {
            name: os.dup(pipe_end)
            for name, pipe_end in (
                ("stdout", ends.stdout),
                ("stderr", ends.stderr),
                ("stack", ends.stack),
            )
        }
        for pipe_end in self.pipes.values():
            os.set_blocking(pipe_end, False)
        self.second_channels: list[messaging.Channel] = []
        self.staging: dict[str, int] = {}
        """Key of an arena → number of its staging file."""
        self.leftovers: set[LeftoverFolders] = set()
        self.is_killed = False

    def put(self, file_descriptor: int, write: Callable[[], bool]) -> None:
        """Write as soon as there is room; nothing to one that is killed, whom nobody reads."""
        while not self.is_killed:
            try:
                if write():
                    return
            except BlockingIOError:
                pass
            except OSError:  # the notebook reads no more
                return
            with selectors.DefaultSelector() as selector:
                selector.register(file_descriptor, selectors.EVENT_WRITE)
                selector.select(_LOOK_S)

    def put_output(self, name: str, content: bytes) -> None:
        """Pass on what it has printed; nothing closes the pipe."""
        if name not in self.pipes:
            return
        if not content:
            os.close(self.pipes.pop(name))
            return
        unwritten = memoryview(content)

        def write() -> bool:
            nonlocal unwritten
            unwritten = unwritten[os.write(self.pipes[name], unwritten) :]
            return not unwritten

        self.put(self.pipes[name], write)

    def put_packet(self, content: bytes, file_descriptors: Sequence[int]) -> None:
        """Pass on what it has said."""
        self.put(self.channel.fileno(), lambda: self.channel.send_packet(content, file_descriptors))

    def channels(self) -> list[messaging.Channel]:
        """Its channels."""
        return [self.channel, *self.second_channels]

    def close(self) -> None:
        """Close this side's ends."""
        for channel in self.channels():
            channel.close()
        memfd.close_all(self.pipes.values())
        self.pipes.clear()


class NodeLink:
    """One node, and a thread that waits for what it has to say.

    Attributes:
        name: The host, as messages call it.
        uses: What its workers used when they were last asked, by number.
        lost_because: Why it is lost; empty while it is there.
    """

    def __init__(self, name: str, actor: Any, links: NodeLinks) -> None:
        self.name = name
        self.uses: dict[int, ProcessUse] = {}
        self.lost_because = ""
        self._actor = actor
        self._links = links
        self._workers: dict[int, _RemoteWorker] = {}
        self._files: dict[int, int] = {}
        self._num_sent = 0
        self._use_asked_at = float("-inf")
        self._use: Any = None
        self._lock = threading.Lock()
        self._ahead_s = self._clock_ahead()
        self._thread = threading.Thread(target=self._listen, name=f"nbaccel: {name}", daemon=True)
        self._thread.start()

    def _clock_ahead(self) -> float:
        """How far the node's clock is ahead of this machine's, in seconds."""
        import ray

        round_trips: list[tuple[float, float]] = []
        for _ in range(_NUM_PINGS):
            sent_at = time.monotonic()
            node_time = ray.get(self._actor.clock.remote())
            took_s = time.monotonic() - sent_at
            round_trips.append((took_s, node_time - (sent_at + took_s / 2)))
        return min(round_trips)[1]

    # ---- to the node

    def send(self, records: Sequence[Any]) -> None:
        """Have the node take records, after those before."""
        if records and not self.lost_because:
            self._actor.take.remote(self._num_sent, list(records))
            self._num_sent += 1

    def fork(self, worker: _RemoteWorker) -> None:
        """Have a worker forked; on a node that is lost it has ended at once."""
        import ray

        with self._lock:
            self._workers[worker.number] = worker
        if self.lost_because:
            self._end_workers()
            return
        try:
            ray.get(self._actor.fork.remote(worker.number), timeout=time_limits.FORK_S)
        except ray.exceptions.GetTimeoutError as error:
            raise StartupFailed(
                f"Host {self.name} did not fork a worker within {time_limits.FORK_S:.0f} s. It may "
                "be overloaded or swapping; all workers have been ended."
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise StartupFailed(f"Host {self.name} did not fork a worker: {error.cause}") from error
        except ray.exceptions.RayError as error:
            self.lose(error_line(error))

    def signal(self, number: int, signal_number: int) -> None:
        """Send a worker a signal."""
        if not self.lost_because:
            self._actor.signal.remote(number, signal_number)

    def kill(self, number: int) -> None:
        """End a worker."""
        with self._lock:
            worker = self._workers.get(number)
        if worker is not None and not self.lost_because:
            worker.is_killed = True
            self._actor.kill.remote(number)

    def ask_use(self) -> None:
        """Have `uses` brought up to date; often called, seldom asked."""
        import ray

        if self._use is not None and ray.wait([self._use], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self.uses = dict(ray.get(self._use))
            self._use = None
        if self._use is None and time.monotonic() - self._use_asked_at >= _USE_S:
            self._use_asked_at = time.monotonic()
            self._use = self._actor.uses.remote()

    # ---- from the node

    def _listen(self) -> None:
        import ray

        try:
            while True:
                for record in ray.get(self._actor.events.remote()):
                    _RECORD_TAKERS[type(record)](self, record)
        except Exception as error:  # whatever it is, its workers cannot be heard any more
            # Of an actor that has died the last line says why.
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.lose(f"Ray says: {shorten_text((lines or [type(error).__name__])[-1], 300)}")

    def lose(self, reason: str) -> None:
        """Note that the node is lost, and all its workers with it."""
        with self._lock:
            if self.lost_because:
                return
            self.lost_because = self._links.explain(self.name) or reason
        self._end_workers()

    def _end_workers(self) -> None:
        for number in tuple(self._workers):
            because = f"host {self.name} was lost ({self.lost_because})"
            # SIGKILL, because that is how they end there: the actor takes them along.
            self._end(number, Ended(number, -9, 0, because, _LOST_REMEDY))

    def _end(self, number: int, ended: Ended) -> None:
        with self._lock:
            worker = self._workers.pop(number, None)
        if worker is not None:
            self._links.forget(worker.channels())
            worker.close()
            self._links.note_end(ended)

    def _on_output(self, output: node_messages.Output) -> None:
        worker = self._workers.get(output.worker)
        if worker is not None:
            worker.put_output(output.stream, output.content)

    def _on_new_file(self, new_file: node_messages.NewFile) -> None:
        self._files[new_file.number] = memfd.create_file(new_file.kind, new_file.num_bytes)

    def _on_bytes(self, file_bytes: node_messages.FileBytes) -> None:
        for first_byte, content in file_bytes.pieces:
            memfd.write_at(self._files[file_bytes.number], memoryview(content), first_byte)

    def _on_packet(self, packet: node_messages.Packet) -> None:
        """Pass a message of a worker on to the notebook, with its files."""
        file_descriptors = [
            self._files.pop(one.number)
            for one in packet.attached
            if isinstance(one, node_messages.FileCopy)
        ]
        worker = self._workers.get(packet.channel)
        if worker is not None:
            message = _peek(packet.content, file_descriptors)
            content = packet.content
            if isinstance(message, messaging.Leaves):
                # The folders are on the node's disks.
                change = worker.leftovers.add if message.is_there else worker.leftovers.discard
                change(message.leftover)
            else:
                self._bring_home(worker, message)
                if type(message) in _TIMED_MESSAGES:
                    content = self._in_own_time(message, content, file_descriptors)
                worker.put_packet(content, file_descriptors)
        memfd.close_all(file_descriptors)

    def _in_own_time(self, message: Any, content: bytes, file_descriptors: list[int]) -> bytes:
        """The packet of a message with its time in this machine's clock."""
        if isinstance(message, messaging.Failed):
            record = message.record
            changed_record = dataclasses.replace(record, time=record.time - self._ahead_s)
            timed: Any = dataclasses.replace(message, record=changed_record)
        else:
            timed = dataclasses.replace(message, time=message.time - self._ahead_s)
        if content[:1] == messaging.IN_FILE:
            os.close(file_descriptors.pop())
        changed, files = messaging.pack_message(timed)
        file_descriptors += files
        return changed

    def _bring_home(self, worker: _RemoteWorker, message: Any) -> None:
        """Fetch what the worker has written into staging files, by its own report."""
        report = getattr(message, "weight_report", None) or getattr(message, "report", None)
        fetched: list[tuple[int, list[memfd.ByteRange], Any]] = []
        for key, byte_ranges in report.own_bytes.items() if report is not None else ():
            for part in _parts(byte_ranges if key in worker.staging else ()):
                number = worker.staging[key]
                fetched.append((number, part, self._actor.read.remote(number, part)))
                if len(fetched) > 1:
                    self._write_home(*fetched.pop(0))
        for waiting in fetched:
            self._write_home(*waiting)

    def _write_home(self, number: int, part: list[memfd.ByteRange], reference: Any) -> None:
        import ray

        self._links.write_home(number, part, ray.get(reference))

    def _on_end(self, worker_ended: node_messages.WorkerEnded) -> None:
        import ray

        worker = self._workers.get(worker_ended.worker)
        if worker is not None and worker.leftovers:
            ray.get(self._actor.remove_leftovers.remote(list(worker.leftovers)))
        number = worker_ended.worker
        self._end(number, dataclasses.replace(worker_ended.ended, pid=number))

    def _on_failure(self, failure: node_messages.NodeFailed) -> None:
        self.lose(failure.reason)

    # ---- the end

    def leave(self) -> Any:
        """Have the node end what is left there; Ray's reference to the answer."""
        return self._actor.leave.remote()

    def close(self) -> None:
        """Wait for the thread, whose actor has been ended, and close what is left."""
        self._thread.join(_LEAVE_S)
        self._end_workers()
        memfd.close_all(self._files.values())
        self._files.clear()


_RECORD_TAKERS: dict[type, Callable[[NodeLink, Any], None]] = {
    node_messages.Output: NodeLink._on_output,
    node_messages.NewFile: NodeLink._on_new_file,
    node_messages.FileBytes: NodeLink._on_bytes,
    node_messages.Packet: NodeLink._on_packet,
    node_messages.WorkerEnded: NodeLink._on_end,
    node_messages.NodeFailed: NodeLink._on_failure,
}


class NodeLinks:
    """All nodes of a launch or pool, and a thread that passes on what the notebook sends."""

    def __init__(self, explain: Callable[[], Mapping[str, str]]) -> None:
        self._explain = explain
        self._links: list[NodeLink] = []
        self._files = SharedFiles()
        self._numbers = itertools.count(_FIRST_WORKER)
        self._ended: list[Ended] = []
        # Readable while an end is kept here that nobody has asked for.
        self._has_ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._is_over, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._pass_on, name="nbaccel: nodes", daemon=True)
        self._thread.start()

    def add(self, name: str, actor: Any) -> NodeLink:
        """Connect a node."""
        link = NodeLink(name, actor, self)
        self._links.append(link)
        return link

    def named(self, name: str) -> NodeLink:
        """The connection to a node."""
        return next(link for link in self._links if link.name == name)

    def lost(self) -> list[str]:
        """Names of the nodes that are lost."""
        return [link.name for link in self._links if link.lost_because]

    def explain(self, name: str) -> str:
        """What the engine knows of a node that is lost."""
        return self._explain().get(name, "")

    def start_worker(self, link: NodeLink, ends: WorkerEnds) -> int:
        """Start a worker on a node; returns the number that it goes by."""
        worker = _RemoteWorker(next(self._numbers), ends)
        self._listen_to(worker.channel, link, worker, worker.number)
        link.fork(worker)
        return worker.number

    # ---- ends of workers

    def fileno(self) -> int:
        """A descriptor that is readable when a worker has ended."""
        return self._has_ended

    def note_end(self, ended: Ended) -> None:
        """A worker has ended."""
        with self._lock:
            self._ended.append(ended)
            os.eventfd_write(self._has_ended, 1)

    def collect(self) -> list[Ended]:
        """Workers that have ended since this was last asked."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._has_ended)
            ended = self._ended
            self._ended = []
        return ended

    # ---- what the notebook sends

    def _listen_to(
        self, channel: messaging.Channel, link: NodeLink, worker: _RemoteWorker, number: int
    ) -> None:
        self._selector.register(channel, selectors.EVENT_READ, (link, worker, number))

    def forget(self, channels: Sequence[messaging.Channel]) -> None:
        """Read these channels no more, before they are closed."""
        with self._lock:
            for channel in channels:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel)

    def _pass_on(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._is_over:
                    return
                link, worker, number = key.data
                try:
                    packet = self._receive(key.fileobj)
                    if packet is None:
                        link.send([node_messages.ChannelClosed(number)])
                    elif packet[0]:
                        self._forward(link, worker, number, *packet)
                except Exception as error:  # of Ray: its object store is full, it was shut down
                    for each in self._links:
                        each.lose(f"what it was sent did not get there: {error_line(error)}")

    def _receive(self, channel: Any) -> tuple[bytes, list[int]] | None:
        """The next packet, an empty one if its worker has ended meanwhile, None at the end."""
        with self._lock:
            if channel.fileno() < 0:
                return b"", []
            try:
                packet: tuple[bytes, list[int]] = channel.receive_packet()
            except BlockingIOError:
                return b"", []
            except EOFError:
                self._selector.unregister(channel)
                return None
            return packet

    def _forward(
        self,
        link: NodeLink,
        worker: _RemoteWorker,
        number: int,
        content: bytes,
        file_descriptors: list[int],
    ) -> None:
        """Pass a message of the notebook on to a worker, with copies of its files."""
        message = messaging.peek_packet(content, file_descriptors)
        hints = _hints_of(message)
        for_all: list[Any] = self._files.changes() if hints.reads_arenas else []
        for_node: list[Any] = []
        # Also where Ray cannot take a copy, such as for want of room.
        with memfd.closing_files(*file_descriptors):
            attached = [
                self._attach(link, worker, file_descriptor, for_all, for_node)
                for file_descriptor in file_descriptors
            ]
        numbers = [one.number for one in attached if isinstance(one, node_messages.FileCopy)]
        staging_numbers = [one for one in numbers if self._files.is_staging(one)]
        # Not strict: where nothing is brought home, no staging files come with it.
        worker.staging.update(zip(hints.staging, staging_numbers, strict=False))
        self._files.name_arenas(hints.arenas, numbers[: len(hints.arenas)])
        packet = node_messages.Packet(
            channel=number,
            content=content,
            attached=tuple(attached),
            topology=getattr(message, "topology", ""),
        )
        for each in self._links:
            each.send(for_all)
        passed_once = [one.number for one in for_node if isinstance(one, node_messages.NewFile)]
        link.send([*for_node, packet, node_messages.Forget(tuple(passed_once))])
        forgotten = self._files.forget_arenas(hints.forgets)
        if hints.ends_staging:
            forgotten += self._files.forget_staging()
        forgotten += self._files.forget_old_payloads()
        if forgotten:
            for each in self._links:
                each.send([node_messages.Forget(tuple(forgotten))])

    def _attach(
        self,
        link: NodeLink,
        worker: _RemoteWorker,
        file_descriptor: int,
        for_all: list[Any],
        for_node: list[Any],
    ) -> node_messages.FileCopy | node_messages.SecondChannel | node_messages.StoreListener:
        """What stands for a descriptor on the node."""
        if stat.S_ISREG(os.fstat(file_descriptor).st_mode):
            if file_kind(file_descriptor) == MESSAGE:
                number, records = self._files.pass_once(file_descriptor)
                for_node += records
            else:
                number, records = self._files.share(file_descriptor)
                for_all += records
            return node_messages.FileCopy(number)
        with socket.socket(fileno=os.dup(file_descriptor)) as attached_socket:
            if attached_socket.family != socket.AF_UNIX:
                return node_messages.StoreListener()
            channel = messaging.Channel.from_fd(attached_socket.detach(), waits=False)
        number = next(self._numbers)
        worker.second_channels.append(channel)
        self._listen_to(channel, link, worker, number)
        return node_messages.SecondChannel(number)

    def write_home(
        self, number: int, byte_ranges: Sequence[memfd.ByteRange], contents: Sequence[Any]
    ) -> None:
        """Write what a rank has written of a staging file to the notebook's."""
        for (first_byte, _), content in zip(byte_ranges, contents, strict=True):
            self._files.take_home(number, first_byte, memoryview(content))

    # ---- the end

    def leave(self) -> None:
        """Have all nodes end what is left there, which must not take long."""
        import ray

        answers = [link.leave() for link in self._links if not link.lost_because]
        with contextlib.suppress(Exception):  # Ray may be gone: then all has ended
            ray.wait(answers, num_returns=len(answers) or 1, timeout=_LEAVE_S)

    def close(self) -> None:
        """Close everything, once all actors have been ended."""
        for link in self._links:
            link.close()
        os.eventfd_write(self._is_over, 1)
        self._thread.join()
        self._selector.close()
        self._files.close()
        memfd.close_all([self._has_ended, self._is_over])


def error_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _peek(content: bytes, file_descriptors: Sequence[int]) -> Any:
    try:
        return messaging.peek_packet(content, file_descriptors)
    except Exception:  # a class that this process lacks: what it says is the reader's
        return None


def _parts(byte_ranges: Sequence[memfd.ByteRange]) -> Iterator[list[memfd.ByteRange]]:
    """Ranges in groups, each of about as many bytes as one call fetches."""
    part: list[memfd.ByteRange] = []
    num_bytes = 0
    for first_byte, end_byte in byte_ranges:
        for piece_start in range(first_byte, end_byte, _HOME_BYTES):
            piece_end = min(end_byte, piece_start + _HOME_BYTES)
            part.append((piece_start, piece_end))
            num_bytes += piece_end - piece_start
            if num_bytes >= _HOME_BYTES:
                yield part
                part = []
                num_bytes = 0
    if part:
        yield part


def _hints_of(message: Any) -> messaging.FileHints:
    """What a message means for files; a pool's task says it by its body."""
    for part in (message, getattr(message, "body", None)):
        file_hints = getattr(part, "file_hints", None)
        if file_hints is not None:
            hints: messaging.FileHints = file_hints()
            return hints
    return messaging.FileHints()
