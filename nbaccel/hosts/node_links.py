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
from nbaccel.hosts.shared_files import SharedFiles
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.resource_use import ProcessUse
from nbaccel.workers.start_method import HostShare, Starter

__all__ = ["NodeLinks", "RemoteStarter", "error_line"]

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
        ends_by_name = {"stdout": ends.stdout, "stderr": ends.stderr, "stack": ends.stack}
        self.pipes = {name: os.dup(end) for name, end in ends_by_name.items()}
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)
        self.second_channels: list[messaging.Channel] = []
        self.staging: dict[str, int] = {}
        """Key of an arena → number of its staging file."""
        self.leftovers: set[LeftoverFolders] = set()
        self.is_killed = False

    def _put(self, fd: int, write: Callable[[], bool]) -> None:
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
                selector.register(fd, selectors.EVENT_WRITE)
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

        self._put(self.pipes[name], write)

    def put_packet(self, content: bytes, fds: Sequence[int]) -> None:
        """Pass on what it has said."""
        self._put(self.channel.fileno(), lambda: self.channel.send_packet(content, fds))

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
        lost_because: Why it is lost; empty while it is there.
    """

    def __init__(self, name: str, actor: Any, links: NodeLinks) -> None:
        self.name = name
        self.lost_because = ""
        self._actor = actor
        self._links = links
        self._workers: dict[int, _RemoteWorker] = {}
        self._files: dict[int, int] = {}
        self._num_sent = 0
        self._uses: dict[int, ProcessUse] = {}
        self._uses_answer: Any = None
        self._uses_asked_at = float("-inf")
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

    def use_of(self, number: int) -> ProcessUse | None:
        """What a worker used when they were last asked. Often called, seldom asked."""
        import ray

        if self._uses_answer is not None and ray.wait([self._uses_answer], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._uses = dict(ray.get(self._uses_answer))
            self._uses_answer = None
        if self._uses_answer is None and time.monotonic() - self._uses_asked_at >= _USE_S:
            self._uses_asked_at = time.monotonic()
            self._uses_answer = self._actor.uses.remote()
        return self._uses.get(number)

    # ---- from the node

    def _listen(self) -> None:
        import ray

        try:
            while True:
                for record in ray.get(self._actor.events.remote()):
                    self._take(record)
        except Exception as error:  # whatever it is, its workers cannot be heard any more
            # Of an actor that has died the last line says why.
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.lose(f"Ray says: {shorten_text((lines or [type(error).__name__])[-1], 300)}")

    def _take(self, record: Any) -> None:
        match record:
            case node_messages.Output():
                worker = self._workers.get(record.worker)
                if worker is not None:
                    worker.put_output(record.stream, record.content)
            case node_messages.NewFile():
                self._files[record.number] = memfd.create_file(record.kind, record.num_bytes)
            case node_messages.FileBytes():
                for first_byte, content in record.pieces:
                    memfd.write_at(self._files[record.number], memoryview(content), first_byte)
            case node_messages.Packet():
                fds = [
                    self._files.pop(one.number)
                    for one in record.attached
                    if isinstance(one, node_messages.FileCopy)
                ]
                worker = self._workers.get(record.channel)
                if worker is not None:
                    self._pass_on(worker, record.content, fds)
                memfd.close_all(fds)
            case node_messages.WorkerEnded():
                self._on_end(record.worker, record.ended)
            case node_messages.NodeFailed():
                self.lose(record.reason)

    def _pass_on(self, worker: _RemoteWorker, content: bytes, fds: list[int]) -> None:
        """Pass a message of a worker on to the notebook, with its files."""
        message = _peek(content, fds)
        if isinstance(message, messaging.Leaves):
            # The folders are on the node's disks.
            if message.is_there:
                worker.leftovers.add(message.leftover)
            else:
                worker.leftovers.discard(message.leftover)
            return
        self._bring_home(worker, message)
        if type(message) in _TIMED_MESSAGES:
            content = self._in_own_time(message, content, fds)
        worker.put_packet(content, fds)

    def _in_own_time(self, message: Any, content: bytes, fds: list[int]) -> bytes:
        """The packet of a message with its time in this machine's clock."""
        if isinstance(message, messaging.Failed):
            record = message.record
            record = dataclasses.replace(record, time=record.time - self._ahead_s)
            timed: Any = dataclasses.replace(message, record=record)
        else:
            timed = dataclasses.replace(message, time=message.time - self._ahead_s)
        if content[:1] == messaging.IN_FILE:
            os.close(fds.pop())
        changed, files = messaging.pack_message(timed)
        fds += files
        return changed

    def _bring_home(self, worker: _RemoteWorker, message: Any) -> None:
        """Fetch what the worker has written into staging files, by its own report."""
        report = getattr(message, "weight_report", None) or getattr(message, "report", None)
        own_bytes = report.own_bytes if report is not None else {}
        parts = [
            (worker.staging[key], part)
            for key, ranges in own_bytes.items()
            if key in worker.staging
            for part in _parts(ranges)
        ]
        waiting: tuple[int, list[memfd.ByteRange], Any] | None = None
        for number, part in parts:
            answer = self._actor.read.remote(number, part)
            # It is under way while the one before is written.
            if waiting is not None:
                self._links.write_home(*waiting)
            waiting = (number, part, answer)
        if waiting is not None:
            self._links.write_home(*waiting)

    def _on_end(self, number: int, ended: Ended) -> None:
        import ray

        worker = self._workers.get(number)
        if worker is not None and worker.leftovers:
            ray.get(self._actor.remove_leftovers.remote(list(worker.leftovers)))
        self._end(number, dataclasses.replace(ended, pid=number))

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


class NodeLinks:
    """All nodes of a launch or pool, and a thread that passes on what the notebook sends."""

    def __init__(self, problems: Callable[[], Mapping[str, str]]) -> None:
        self._problems = problems
        self._links: dict[str, NodeLink] = {}
        self._files = SharedFiles()
        self._numbers = itertools.count(_FIRST_WORKER)
        self._ended: list[Ended] = []
        # Readable while an end is kept here that nobody has asked for.
        self._has_ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._is_over, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._relay, name="nbaccel: nodes", daemon=True)
        self._thread.start()

    def add(self, name: str, actor: Any) -> None:
        """Connect a node."""
        self._links[name] = NodeLink(name, actor, self)

    def named(self, name: str) -> NodeLink:
        """The connection to a node."""
        return self._links[name]

    def lost(self) -> tuple[str, ...]:
        """Names of the nodes that are lost."""
        return tuple(link.name for link in self._links.values() if link.lost_because)

    def explain(self, name: str) -> str:
        """What the engine knows of a node that is lost."""
        return self._problems().get(name, "")

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

    def _relay(self) -> None:
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
                    for each in self._links.values():
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
        self, link: NodeLink, worker: _RemoteWorker, number: int, content: bytes, fds: list[int]
    ) -> None:
        """Pass a message of the notebook on to a worker, with copies of its files."""
        message = messaging.peek_packet(content, fds)
        hints = _hints_of(message)
        records: list[Any] = self._files.changes() if hints.reads_arenas else []
        # Also where Ray cannot take a copy, such as for want of room.
        with memfd.closing_files(*fds):
            attached = [self._attach(link, worker, fd, records) for fd in fds]
        self._send_all(records)
        numbers = [one.number for one in attached if isinstance(one, node_messages.FileCopy)]
        staging = [one for one in numbers if self._files.is_staging(one)]
        # Not strict: where nothing is brought home, no staging files come with it.
        worker.staging.update(zip(hints.staging, staging, strict=False))
        self._files.name_arenas(hints.arenas, numbers[: len(hints.arenas)])
        packet = node_messages.Packet(
            channel=number,
            content=content,
            attached=tuple(attached),
            topology=getattr(message, "topology", ""),
        )
        link.send([packet])
        forgotten = self._files.forget_arenas(hints.forgets)
        if hints.ends_staging:
            forgotten += self._files.forget_staging()
        forgotten += self._files.forget_old_payloads()
        if forgotten:
            self._send_all([node_messages.Forget(tuple(forgotten))])

    def _send_all(self, records: Sequence[Any]) -> None:
        for link in self._links.values():
            link.send(records)

    def _attach(
        self, link: NodeLink, worker: _RemoteWorker, fd: int, records: list[Any]
    ) -> node_messages.FileCopy | node_messages.SecondChannel | node_messages.StoreListener:
        """What stands for a descriptor on the node; adds what nodes need to have it."""
        if stat.S_ISREG(os.fstat(fd).st_mode):
            number, new_records = self._files.share(fd)
            records += new_records
            return node_messages.FileCopy(number)
        with socket.socket(fileno=os.dup(fd)) as attached_socket:
            if attached_socket.family != socket.AF_UNIX:
                return node_messages.StoreListener()
            channel = messaging.Channel.from_fd(attached_socket.detach(), waits=False)
        number = next(self._numbers)
        worker.second_channels.append(channel)
        self._listen_to(channel, link, worker, number)
        return node_messages.SecondChannel(number)

    def write_home(self, number: int, ranges: Sequence[memfd.ByteRange], answer: Any) -> None:
        """Write what a rank has written of a staging file to the notebook's."""
        import ray

        for (first_byte, _), content in zip(ranges, ray.get(answer), strict=True):
            self._files.take_home(number, first_byte, memoryview(content))

    # ---- the end

    def leave(self) -> None:
        """Have all nodes end what is left there, which must not take long."""
        import ray

        answers = [link.leave() for link in self._links.values() if not link.lost_because]
        with contextlib.suppress(Exception):  # Ray may be gone: then all has ended
            ray.wait(answers, num_returns=len(answers) or 1, timeout=_LEAVE_S)

    def close(self) -> None:
        """Close everything, once all actors have been ended."""
        for link in self._links.values():
            link.close()
        os.eventfd_write(self._is_over, 1)
        self._thread.join()
        self._selector.close()
        self._files.close()
        memfd.close_all([self._has_ended, self._is_over])


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
        return self._link_of[pid].use_of(pid)


def error_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _peek(content: bytes, fds: Sequence[int]) -> Any:
    try:
        return messaging.peek_packet(content, fds)
    except Exception:  # a class that this process lacks: what it says is the reader's
        return None


def _parts(ranges: Sequence[memfd.ByteRange]) -> Iterator[list[memfd.ByteRange]]:
    """Ranges in groups, each of about as many bytes as one call fetches."""
    part: list[memfd.ByteRange] = []
    num_bytes = 0
    for first_byte, end_byte in ranges:
        for start in range(first_byte, end_byte, _HOME_BYTES):
            end = min(end_byte, start + _HOME_BYTES)
            part.append((start, end))
            num_bytes += end - start
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
