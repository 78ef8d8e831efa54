"""The notebook's side of its nodes: what makes workers of other machines look local.

    WorkerHandle ── NodeChannel.send ════════════ NodeActor.take ════►  worker's channel
                 ◄─ channel, pipes ─ thread of ◄═ NodeActor.events ═══  worker's channel, pipes
                                     the node
    RemoteStarter ───────────────────► NodeActor.fork, act_on ══════►  template, system
                 ◄─ ended ────────── thread of the node

Of messages it reads what they mean for memory files (`messaging.FileHints`, reports of weights).
Their times are those of their arrival: each node has a clock of its own.

[Note: the notebook's memory files] All nodes have copies of them.

    notebook's file                        node's copy                     gets there, and back
    arena, or a checkpoint's file   ──►    one, however many ranks map it  all of it; later what has
                                                                           changed since
    staging file                    ──►    one, empty                      nothing
                                    ◄──                                    what a rank wrote of it
    payloads, long messages         ──►    one                             all of it

What is large goes by Ray's object store, which brings it once to each node; it stays there until
all nodes have written it into their copy. The kind of a file is in its name: memory files have one,
which only people and this module read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
import re
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import xxhash

from nbaccel.base.atomic import LeftoverFolders
from nbaccel.base.errors import StartupFailed
from nbaccel.base.processes import ProcessUse
from nbaccel.base.training_metrics import Metrics
from nbaccel.base.units import shorten_text
from nbaccel.hosts.node_actor import FileContent, Packet
from nbaccel.hosts.ray_host import error_line
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.worker_processes import HostShare, Starter

# No process has such a number (Linux: 2**22 at most), so none can be hit by mistake.
_FIRST_WORKER = 2**22 + 1
_LOOK_S = 0.1
_PARTS_AHEAD = 2  # Parts of weights that a node has read and this side has not
_LEAVE_S = 3.0
_LOST_REMEDY = (
    "The machine was shut down, its processes were killed, or the network between it and this one "
    "is gone. Launch again without it, or with max_restarts, which goes on with the hosts left."
)


class _RemoteWorker:
    """A worker of a node: the ends of its connections that a worker of this machine would have."""

    def __init__(self, number: int, ends: WorkerEnds) -> None:
        self.number = number
        self.channel = messaging.Channel.from_fd(os.dup(ends.channel), waits=False)
        self.pipes = {name: os.dup(getattr(ends, name)) for name in ("stdout", "stderr", "stack")}
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)
        self.staging: dict[str, SharedFile] = {}  # by the key of the arena that it belongs to
        self.leftovers: set[LeftoverFolders] = set()
        self.is_killed = False

    def _has_room(self, fd: int) -> bool:
        """Wait until the notebook has read enough; False for one that is killed: nobody reads."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not self.is_killed:
            if poll.poll(_LOOK_S * 1000):
                return True
        return False

    def put_output(self, name: str, content: bytes) -> None:
        """Pass on what it has printed; nothing closes the pipe."""
        if name not in self.pipes:
            return
        if not content:
            os.close(self.pipes.pop(name))
            return
        pipe = self.pipes[name]
        unwritten = memoryview(content)
        with contextlib.suppress(OSError):  # the notebook reads no more
            while unwritten and self._has_room(pipe):
                unwritten = unwritten[os.write(pipe, unwritten) :]

    def put_packet(self, content: bytes, fds: Sequence[int]) -> None:
        """Pass on what it has said."""
        with contextlib.suppress(OSError):  # the notebook reads no more
            while self._has_room(self.channel.fileno()):
                if self.channel.send_packet(content, fds):
                    return

    def put_display(self, content: bytes, files: Sequence[int]) -> None:
        """The same, before what it prints next: see `Channel.send_in_turn`."""
        waiting, taken = os.pipe()
        with memfd.closing_files(waiting):
            with memfd.closing_files(taken):
                self.put_packet(content, [taken, *files])
            messaging.wait([waiting], time_limits.DISPLAY_S)

    def close(self) -> None:
        self.channel.close()
        memfd.close_all(self.pipes.values())
        self.pipes.clear()


class NodeChannel(messaging.Channel):
    """The notebook's end of a worker's channel, which sends by the node's actor."""

    def __init__(
        self, channel: messaging.Channel, send: Callable[[bytes, Sequence[int]], None]
    ) -> None:
        super().__init__(socket.socket(fileno=channel.detach()))
        self._send = send

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        self._send(packet, descriptors)
        return True

    def receive(self) -> tuple[Any, list[int]]:
        """The next message, with the time of its arrival."""
        message, descriptors = super().receive()
        now = time.monotonic()
        if isinstance(message, Metrics):
            message = dataclasses.replace(message, time=now)
        elif isinstance(message, messaging.Failed):
            record = dataclasses.replace(message.record, time=now)
            message = dataclasses.replace(message, record=record)
        return message, descriptors


class NodeLink:
    """One node, and a thread that waits for what it has to say."""

    def __init__(self, name: str, actor: Any, starter: RemoteStarter) -> None:
        self.name = name
        self.lost_because = ""
        self._actor = actor
        self._starter = starter
        self._workers: dict[int, _RemoteWorker] = {}
        self._sent: Any = None  # Ray's reference to the end of the last `take`
        self._uses: dict[int, ProcessUse] = {}
        self._uses_answer: Any = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"nbaccel: {name}", daemon=True)
        self._thread.start()

    # ---- to the node

    def send(
        self,
        files: Sequence[FileContent] = (),
        packet: Packet | None = None,
        forgotten: Sequence[int] = (),
    ) -> None:
        """Have the node take these, after those before."""
        if (files or packet or forgotten) and not self.lost_because:
            self._sent = self._actor.take.remote(list(files), packet, list(forgotten), self._sent)

    def tell(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; Ray's reference to the answer, if the node is there."""
        return None if self.lost_because else getattr(self._actor, method).remote(*arguments)

    def fork(self, worker: _RemoteWorker) -> None:
        """Have a worker forked; on a node that is lost it has ended at once."""
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
                "be overloaded; all workers have been ended."
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise StartupFailed(f"Host {self.name} did not fork a worker: {error.cause}") from error
        except ray.exceptions.RayError as error:
            self.lose(error_line(error))

    def use_of(self, number: int) -> ProcessUse | None:
        """What a worker used when they were last asked. Often called, seldom asked."""
        if self._uses_answer is not None and ray.wait([self._uses_answer], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._uses = dict(ray.get(self._uses_answer))
            self._uses_answer = None
        if self._uses_answer is None:
            self._uses_answer = self.tell("uses")
        return self._uses.get(number)

    # ---- from the node

    def _listen(self) -> None:
        try:
            while True:
                for method, arguments in ray.get(self._actor.events.remote()):
                    getattr(self, method)(*arguments)
        except Exception as error:  # whatever it is, its workers cannot be heard any more
            # Of an actor that has died the last line says why.
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.lose(f"Ray says: {shorten_text((lines or [type(error).__name__])[-1], 300)}")

    def worker_printed(self, number: int, stream: str, content: bytes) -> None:
        """Pass on what a worker has printed."""
        if number in self._workers:
            self._workers[number].put_output(stream, content)

    def worker_said(self, number: int, content: bytes, attached: Sequence[Any]) -> None:
        """Pass a message of a worker on to the notebook, with the bytes of its files."""
        worker = self._workers.get(number)
        if worker is None:
            return
        with contextlib.ExitStack() as sent:
            fds = []
            for file_bytes in attached:
                fds.append(memfd.create_file("payload", file_bytes.nbytes))
                sent.callback(os.close, fds[-1])
                memfd.write_at(fds[-1], memoryview(file_bytes), 0)
            try:
                message = messaging.peek_packet(content, fds)
            except Exception:  # a class that this process lacks: what it says is the reader's
                message = None
            if isinstance(message, messaging.Leaves):
                message.note_in(worker.leftovers)
                return
            if isinstance(message, (messaging.Display, messaging.ClearOutput)):
                worker.put_display(content, fds[1:])
                return
            report = getattr(message, "weight_report", None)
            if report is not None:
                self._bring_home(worker, report.own_bytes)
            worker.put_packet(content, fds)

    def worker_ended(self, number: int, ended: Ended) -> None:
        """Note the end of a worker, once nothing of it is left on the node's disks."""
        if number in self._workers and (leftovers := self._workers[number].leftovers):
            ray.get(self.tell("remove_leftovers", list(leftovers)))
        self._end(number, dataclasses.replace(ended, pid=number))

    def _bring_home(
        self, worker: _RemoteWorker, own_bytes: Mapping[str, Sequence[memfd.ByteRange]]
    ) -> None:
        """Fetch what the worker has written into staging files, by its own report."""
        # A generator of Ray's; the next parts are under way while one is written.
        read = self._actor.read.options(_generator_backpressure_num_objects=_PARTS_AHEAD)
        for key in own_bytes.keys() & worker.staging.keys():
            file = worker.staging[key]
            for part in read.remote(file.number, own_bytes[key]):
                for first_byte, content in ray.get(part):
                    memfd.write_at(file.descriptor, memoryview(content), first_byte)

    def lose(self, reason: str) -> None:
        """Note that the node is lost, and all its workers with it."""
        with self._lock:
            if self.lost_because:
                return
            self.lost_because = self._starter.problems().get(self.name) or reason
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
            worker.close()
            self._starter.note_end(ended)

    def close(self) -> None:
        """Wait for the thread, whose actor has been ended, and close what is left."""
        self._thread.join(_LEAVE_S)
        self._end_workers()


class RemoteStarter(Starter):
    """Starts workers on the nodes of a launch or pool, and passes on what they are sent."""

    def __init__(self, problems: Callable[[], Mapping[str, str]]) -> None:
        self.problems = problems
        self._links: dict[str, NodeLink] = {}
        self._next_links: Iterator[NodeLink] = iter(())
        self._workers: dict[int, tuple[NodeLink, _RemoteWorker]] = {}
        self._files = SharedFiles()
        self._numbers = itertools.count(_FIRST_WORKER)
        self._ended: dict[int, Ended] = {}
        # Readable while an end is kept here that nobody has asked for.
        self._has_ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def add(self, name: str, actor: Any) -> None:
        self._links[name] = NodeLink(name, actor, self)

    def lost(self) -> tuple[str, ...]:
        return tuple(link.name for link in self._links.values() if link.lost_because)

    def begin(self, shares: Sequence[HostShare]) -> None:
        """The workers of an attempt are started next, so many on each host."""
        self.shares = shares
        # What came too late for the attempt before.
        self._ended.clear()
        names = [share.name for share in shares for _ in range(share.num_workers)]
        self._next_links = iter([self._links[name] for name in names])

    def start(self, ends: WorkerEnds) -> int:
        """Start a worker on the next host that has room; returns a number for it."""
        link = next(self._next_links)
        worker = _RemoteWorker(next(self._numbers), ends)
        self._workers[worker.number] = (link, worker)
        link.fork(worker)
        return worker.number

    def channel_to(self, pid: int, channel: messaging.Channel) -> messaging.Channel:

        def send(content: bytes, fds: Sequence[int]) -> None:
            with self._sending:
                try:
                    self._forward(pid, content, fds)
                except Exception as error:  # of Ray: its object store is full, it was shut down
                    for each in self._links.values():
                        each.lose(f"what it was sent did not get there: {error_line(error)}")

        return NodeChannel(channel, send)

    def sentinel(self, pid: int) -> int:
        """A descriptor that is readable when any worker has ended."""
        return os.dup(self._has_ended)

    def signal(self, pid: int, number: int) -> None:
        self._workers[pid][0].tell("act_on", pid, "signal", number)

    def kill(self, pid: int) -> None:
        link, worker = self._workers[pid]
        worker.is_killed = True
        link.tell("act_on", pid, "kill")

    def use_of(self, pid: int) -> ProcessUse | None:
        return self._workers[pid][0].use_of(pid)

    def note_end(self, ended: Ended) -> None:
        with self._lock:
            self._ended[ended.pid] = ended
            os.eventfd_write(self._has_ended, 1)

    def end_of(self, pid: int) -> Ended | None:
        with self._lock:
            ended = self._ended.pop(pid, None)
            if not self._ended:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._has_ended)
        return ended

    # ---- what the notebook sends

    def _forward(self, pid: int, content: bytes, fds: Sequence[int]) -> None:
        """Pass a message of the notebook on to a worker, with copies of its files."""
        link, worker = self._workers[pid]
        message = messaging.peek_packet(content, fds)
        hints = getattr(getattr(message, "body", None), "hints", messaging.FileHints())
        contents = self._files.changes() if hints.reads_arenas else []
        attached: list[int | None] = []
        files = []
        for fd in fds:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                file, news = self._files.share(fd)
                contents += news
                files.append(file)
                attached.append(file.number)
            else:
                attached.append(None)
        # Not strict: where nothing is brought home, no staging files come with it.
        staging = [file for file in files if file.kind == STAGING]
        worker.staging.update(zip(hints.staging, staging, strict=False))
        for key, file in zip(hints.arenas, files, strict=False):
            file.arena_key = key
        packet = (worker.number, content, tuple(attached), getattr(message, "place", None))
        forgotten = self._files.forget(hints.forgets, staging=hints.ends_staging)
        for each in self._links.values():
            each.send(contents, packet if each is link else None, forgotten)

    def leave(self) -> None:
        """Have all nodes end what is left there, which must not take long."""
        answers = [answer for link in self._links.values() if (answer := link.tell("leave"))]
        with contextlib.suppress(Exception):  # Ray may be gone: then all has ended
            ray.wait(answers, num_returns=len(answers) or 1, timeout=_LEAVE_S)

    def end(self) -> None:
        """Close everything, once all actors have been ended."""
        for link in self._links.values():
            link.close()
        self._files.close()
        os.close(self._has_ended)


ARENA = "arena"
STAGING = "staging"
_KEPT_PAYLOADS = 8
"""A payload is sent to one rank after the other; further ones are not needed again."""
_PIECE_BYTES = 1 << 20  # What has changed is found and sent in pieces of this size
_LEAST_STORED_BYTES = 1 << 16  # Less goes as an argument of the call
_MEMORY_FILE = re.compile(r"/memfd:nbaccel-(\S+) \(deleted\)$")


@dataclass(eq=False)
class SharedFile:
    """A file of the notebook's."""

    number: int  # Its name on the nodes
    descriptor: int
    kind: str  # `arena`, `staging`, `payload`, `message`
    num_bytes: int
    arena_key: str = ""
    digests: dict[int, int] = field(default_factory=dict)
    """First byte of a piece → digest of what was sent."""

    def news(self) -> FileContent:
        """What of it nodes have not been sent; of a staging file, which ranks fill, nothing."""
        if self.kind == STAGING:
            return self.number, self.kind, self.num_bytes, ()
        with mmap.mmap(self.descriptor, self.num_bytes, access=mmap.ACCESS_READ) as content:
            array = np.frombuffer(content, dtype=np.uint8)
            changed = {}
            for start in range(0, self.num_bytes, _PIECE_BYTES):
                digest = xxhash.xxh3_64_intdigest(array[start : start + _PIECE_BYTES].data)
                if self.digests.get(start) != digest:
                    changed[start] = digest
            self.digests |= changed
            pieces = [(start, array[start : start + _PIECE_BYTES]) for start in changed]
            is_large = sum(piece.nbytes for _, piece in pieces) >= _LEAST_STORED_BYTES
            copies: Any = [(start, piece.copy()) for start, piece in pieces]
            copies = ray.put(pieces) if is_large else copies
            # Or the mapping could not be closed.
            del array, pieces
        return self.number, self.kind, self.num_bytes, copies


class SharedFiles:
    """What records all nodes have to be sent; the files of one session."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], SharedFile] = {}
        self._numbers = itertools.count()

    def share(self, fd: int) -> tuple[SharedFile, list[FileContent]]:
        """A file, and what nodes need to have a copy, unless they have one."""
        identity = memfd.file_identity(fd)
        if identity in self._files:
            return self._files[identity], []
        name = _MEMORY_FILE.match(str(Path(f"/proc/self/fd/{fd}").readlink()))
        file = SharedFile(
            number=next(self._numbers),
            # Open as long as the copies are there: the system could give its number to another.
            descriptor=os.dup(fd),
            # A file on disk is a checkpoint whose tensors are mapped: an arena like any other.
            kind=name[1] if name else ARENA,
            num_bytes=os.fstat(fd).st_size,
        )
        self._files[identity] = file
        return file, [file.news()]

    def changes(self) -> list[FileContent]:
        """What the notebook has written to its arenas since they were sent."""
        return [
            content
            for file in self._files.values()
            # Its pieces: what is as it was when it was sent is not sent again.
            if file.kind == ARENA and (content := file.news())[-1]
        ]

    def forget(self, arena_keys: Collection[str], *, staging: bool) -> list[int]:
        """Drop these arenas, all staging files if asked to, and payloads that no rank will get."""
        payloads = [file for file in self._files.values() if file.kind not in (ARENA, STAGING)]
        return self._drop(
            file
            for file in self._files.values()
            if file.arena_key in arena_keys
            or (staging and file.kind == STAGING)
            or file in payloads[:-_KEPT_PAYLOADS]
        )

    def close(self) -> None:
        self._drop(self._files.values())

    def _drop(self, dropped_files: Iterable[SharedFile]) -> list[int]:
        dropped = list(dropped_files)
        self._files = {key: file for key, file in self._files.items() if file not in dropped}
        memfd.close_all(file.descriptor for file in dropped)
        return [file.number for file in dropped]
