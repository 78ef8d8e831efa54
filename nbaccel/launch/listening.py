"""Hearing what workers say: one `select` for output, messages, deaths and interrupts.

pipes ─────► Console ─────► the cell
channels ──► messages ──► `on_message`
sentinels ─► deaths ────► `on_death`
wake pipe ─► an interrupt of the notebook, or a click on Stop ──► `on_interrupt`

Nothing is polled and no thread is started. Beside it stands who shows how the work goes on: it is
told of metrics, and looks whenever it wants to. What it all means is decided by who listens: the
supervisor of a launch, or the watch over a turn of a pool.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nbaccel.launch import failure, system, template, wire
from nbaccel.launch.console import Console
from nbaccel.launch.member import Member

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # as much as a pipe can hold; see `member`


class Show(Protocol):
    """Who shows how the work goes on."""

    def due_in(self) -> float:
        """Seconds until it wants to look."""

    def hear(self, rank: int, message: wire.Metrics) -> None:
        """A rank has told of its training."""

    def look(self, watched: Any) -> None:
        """Look at a listener and what it knows; called often, and cheap if it is not time yet."""


class Listener:
    """Listens to some workers.

    Args:
        members: The workers, by rank.
        console: Where their output goes.
        show: Who shows how they get on; None for nobody.
    """

    def __init__(
        self, members: Sequence[Member], console: Console, show: Show | None = None
    ) -> None:
        self.members = list(members)
        self._console = console
        self._show = show
        self._selector = selectors.DefaultSelector()
        self._paused: dict[int, Member] = {}
        """Pipes that are not read just now: the worker waits in its `print`."""
        self._wake = _Wake()

    # ---- what a listener decides

    def on_message(self, member: Member, message: Any, fds: list[int]) -> None:
        """A worker has said something; the descriptors are the listener's."""
        raise NotImplementedError

    def on_sentinel(self) -> None:
        """Some worker may have ended."""
        raise NotImplementedError

    def on_interrupt(self) -> None:
        """The notebook was interrupted."""
        raise NotImplementedError

    # ---- from outside

    def interrupt(self) -> None:
        """Do what interrupting the notebook does; from any thread.

        It has no effect unless this listens just now: one who comes late stops nothing else.
        """
        self._wake.ring()

    @property
    def clears(self) -> int:
        """How often the cell's output has been cleared."""
        return self._console.clears

    def last_lines(self) -> dict[int, str]:
        """What each rank has printed last."""
        return self._console.last_lines()

    def notice(self, text: str) -> None:
        """Show a line that is no worker's, after what has been printed so far."""
        self._console.notice(text)

    def make_room(self) -> None:
        """Take away what is drawn over, before something else is shown."""
        self._console.make_room()

    # ---- listening

    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""
        return self._console.tails()

    @contextlib.contextmanager
    def listening(self, sentinels: Sequence[int]) -> Iterator[None]:
        """Listen within this block, with interrupts caught.

        Args:
            sentinels: Descriptors that become readable when a worker may have ended.
        """
        with self._wake.open() as woken:
            register = self._selector.register
            register(woken, selectors.EVENT_READ, woken)
            for fd in sentinels:
                register(fd, selectors.EVENT_READ, None)
            for member in self.members:
                register(member.channel, selectors.EVENT_READ, member)
                for fd in member.pipes:
                    register(fd, selectors.EVENT_READ, member)
            if self._show is not None:
                self._show.look(self)  # from now on it can be stopped
            try:
                yield
            finally:
                self._selector.close()

    def hear(self, patience_s: float | None) -> None:
        """Wait until something happens, at most so long, and let it be decided."""
        if self._show is not None:
            due = self._show.due_in()
            patience_s = due if patience_s is None else min(patience_s, due)
        for key, _ in self._selector.select(patience_s):
            if key.data is None:
                self.on_sentinel()
            elif not isinstance(key.data, Member):
                os.read(key.data, 4096)
                template.go_on()
                self.on_interrupt()
            elif key.fileobj is key.data.channel:
                if not key.data.hung_up:
                    self._hear_message(key.data)
            elif key.fd in self._selector.get_map():  # no death earlier in this batch has ended it
                self._hear_output(key.data, key.fd)
        self._console.tick()
        self._resume()
        if self._show is not None:
            self._show.look(self)

    def end_is_near(self) -> None:
        """Stop was pressed, or a worker has failed: output must not hold that up."""
        self._console.end_is_near()
        self._resume()

    def show_rest(self) -> None:
        """Show what is waiting when all are through; an interrupt is heard meanwhile."""
        while self._console.is_behind:
            self.hear(self._console.due_in())

    def drain(self, member: Member) -> None:
        """Read what the worker left behind; a grandchild may hold the pipes open for ever."""
        while not member.hung_up and _is_readable(member.channel.fileno()):
            self._hear_message(member)
        self._hang_up(member)
        self.drain_output(member)
        for fd in member.pipes:
            self._forget(fd)

    def drain_output(self, member: Member) -> None:
        """Read all that the worker has printed so far."""
        for fd in tuple(member.pipes):
            left = _PIPE_BYTES  # of a thread that prints for ever: what was there when we began
            while left > 0 and fd in member.pipes and self._hear_output(member, fd):
                left -= _CHUNK_BYTES

    def _hear_message(self, member: Member) -> None:
        try:
            message, fds = member.channel.receive()
        except EOFError:
            self._hang_up(member)
            return
        if isinstance(message, (wire.Display, wire.ClearOutput)):
            self.drain_output(member)  # what it printed before comes before
            self._console.feed_display(member.rank, message)
        elif isinstance(message, wire.Metrics):
            if self._show is not None:
                self._show.hear(member.rank, message)
        elif isinstance(message, wire.Leaves):
            member.note(message)
        else:
            self.on_message(member, message, fds)

    def _hear_output(self, member: Member, fd: int) -> bool:
        """Take in a chunk of output; returns whether there may be more."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        stream = member.pipes[fd]
        if not data:
            self._forget(fd)
            del member.pipes[fd]
            os.close(fd)
            return False
        if stream == "stack":
            member.stack_text += data.decode(errors="replace")
        else:
            self._console.feed(member.rank, stream, data)
            if fd not in self._paused and self._console.is_full(member.rank):
                self._forget(fd)
                self._paused[fd] = member
        return len(data) == _CHUNK_BYTES

    def _resume(self) -> None:
        for fd, member in tuple(self._paused.items()):
            if not self._console.is_full(member.rank):
                del self._paused[fd]
                self._selector.register(fd, selectors.EVENT_READ, member)

    def _forget(self, fd: int) -> None:
        """Read this pipe no more."""
        if self._paused.pop(fd, None) is None:
            self._selector.unregister(fd)

    def _hang_up(self, member: Member) -> None:
        if not member.hung_up:
            member.hung_up = True
            self._selector.unregister(member.channel)


def death_of(member: Member, ended: wire.Ended, oom_kills: int) -> failure.Record:
    """The record of a worker that ended by itself.

    Args:
        member: The worker.
        ended: How it ended.
        oom_kills: How often the system had run out of memory before.
    """
    return failure.Record(
        rank=member.rank,
        time=time.monotonic(),
        exit_status=ended.status,
        stack=member.last_words(),
        max_rss_bytes=ended.max_rss_bytes,
        evidence=system.explain_kill(ended.status, oom_kills),
        doing=ended.because,
    )


class _Wake:
    """A pipe whose one end is in the `select`: whoever writes to the other one interrupts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ringer: int | None = None

    def ring(self) -> None:
        """Interrupt, if somebody listens."""
        with self._lock:
            if self._ringer is not None:
                os.write(self._ringer, b"i")

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Let an interrupt of the notebook wake `select` instead of raising in the middle."""
        woken, waker = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(waker, False)  # nobody rings so often, and a handler must not hang
        main = threading.current_thread() is threading.main_thread()

        def on_interrupt(signum: int, frame: Any) -> None:
            os.write(waker, b"i")  # without the lock: this may come while it is held here

        before = signal.signal(signal.SIGINT, on_interrupt) if main else None
        self._ringer = waker
        try:
            yield woken
        finally:
            with self._lock:
                self._ringer = None
            if main:
                signal.signal(signal.SIGINT, before)
            os.close(woken)
            os.close(waker)


def _is_readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))
