"""Watching the workers of one launch until all have ended.

pipes ─────► Console ─────► the cell            one select() waits for everything:
channels ──► messages ──► Member.state          output, messages, deaths, interrupts;
sentinels ─► deaths                             nothing is polled, no thread is started
wake pipe ─► an interrupt of the notebook
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nbaccel.launch import failure, publish, system, wire
from nbaccel.launch.console import Console
from nbaccel.launch.ending import GRACE_S, Ending
from nbaccel.launch.lingering import Lingering
from nbaccel.launch.member import Member, State
from nbaccel.launch.starter import Starter

_CHUNK_BYTES = 1 << 16
_BORN_S = 20.0  # a forked process that says nothing for so long hangs


class Supervisor:
    """Watches the workers of one launch.

    Args:
        starter: Who started them, and learns of their end.
        members: The workers of this node, by rank.
        console: Where their output goes.
        timeout_s: Seconds after which the launch is ended; None for no limit.
    """

    def __init__(
        self,
        starter: Starter,
        members: Sequence[Member],
        *,
        console: Console,
        timeout_s: float | None,
    ) -> None:
        self._starter = starter
        self.members = list(members)
        self._console = console
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._selector = selectors.DefaultSelector()
        self._ending: Ending | None = None
        self._oom_kills = system.oom_kills()
        self._lingering = Lingering(self.members)
        self.interrupted = False
        self.timed_out = False
        self.stuck: list[Member] = []
        """Workers that never said a word."""

    def run(self) -> None:
        """Wait until every worker has ended; what became of them stands in `members`."""
        with self._wakeable() as woken:
            self._register(woken)
            try:
                while not all(m.has_ended for m in self.members):
                    if self._given_up():
                        break
                    self._wait(woken)
            finally:
                self._selector.close()
        self._console.tick(final=True)

    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""
        return self._console.tails()

    # ---- waiting

    def _register(self, woken: int) -> None:
        register = self._selector.register
        register(woken, selectors.EVENT_READ, None)
        for fd in self._starter.sentinels():
            register(fd, selectors.EVENT_READ, self._starter)
        for member in self.members:
            register(member.channel, selectors.EVENT_READ, member)
            for fd in member.pipes:
                register(fd, selectors.EVENT_READ, member)

    def _wait(self, woken: int) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.data is self._starter:
                self._collect()
            elif key.data is None:
                self._on_wake(woken)
            elif key.fileobj is key.data.channel:
                if not key.data.hung_up:
                    self._on_message(key.data)
            elif key.fd in key.data.pipes:  # a death earlier in this batch may have closed it
                self._on_output(key.data, key.fd)
        self._console.tick()
        self._check_clocks()

    def _patience(self) -> float | None:
        now = time.monotonic()
        due = [self._console.due_in()]
        if self._ending is not None:
            at = self._ending.advance(self.members)
            due.append(None if at is None else max(0.0, at - now))
        else:
            due += [max(0.0, at - now) for at in self._alarms()]
        return min((d for d in due if d is not None), default=None)

    def _alarms(self) -> Iterator[float]:
        if self._deadline is not None:
            yield self._deadline
        yield from (m.born + _BORN_S for m in self.members if m.state is State.BORN)
        if (at := self._lingering.due()) is not None:
            yield at

    def _check_clocks(self) -> None:
        now = time.monotonic()
        if self._ending is not None:
            return
        silent = [m for m in self.members if m.state is State.BORN and now > m.born + _BORN_S]
        if silent:
            self.stuck = silent
            self._end(grace_s=0.0)
        elif self._deadline is not None and now > self._deadline:
            self.timed_out = True
            self._end(grace_s=0.0)
        elif notice := self._lingering.advance():
            self._console.notice(notice)

    def _given_up(self) -> bool:
        """Whether the last worker cannot be killed: it hangs in a driver."""
        return self._ending is not None and self._ending.advance(self.members) is None

    # ---- what can happen

    def _on_message(self, member: Member) -> None:
        try:
            message, fds = member.channel.receive()
        except EOFError:
            self._hang_up(member)
            return
        if isinstance(message, wire.Alive):
            member.state = State.ALIVE
            member.tells_its_stack = True
        elif isinstance(message, wire.Started):
            member.state = State.RUNNING
        elif isinstance(message, wire.Interrupting):
            if self._ending is not None:
                self._ending.extend(member)
        elif isinstance(message, wire.Returned):
            member.state, member.returned = State.RETURNED, message
            member.result_fd = fds[0] if fds else None
        elif isinstance(message, wire.Failed):
            self._on_failure(member, message, fds)
        else:
            self._console.tick(final=True)
            publish.show(message)

    def _on_failure(self, member: Member, message: wire.Failed, fds: list[int]) -> None:
        member.state = State.FAILED
        member.error = (message, fds[0] if fds else None)
        if not member.told:
            member.record = message.record
        if self._ending is None:
            self._end(grace_s=GRACE_S)

    def _on_output(self, member: Member, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        stream = member.pipes[fd]
        if not data:
            self._selector.unregister(fd)
            del member.pipes[fd]
            os.close(fd)
        elif stream == "stack":
            member.stack_text += data.decode(errors="replace")
        else:
            self._console.feed(member.rank, stream, data)

    def _on_wake(self, woken: int) -> None:
        os.read(woken, 4096)
        if self._ending is not None:
            # Stop was pressed twice, or while a failure is wound up: that one is still to be told.
            self._ending.hurry()
            return
        self.interrupted = True
        self._ending = Ending(self.members, grace_s=0.0, ask_stacks=False)

    def _collect(self) -> None:
        by_pid = {m.pid: m for m in self.members}
        for ended in self._starter.collect():
            if ended.pid in by_pid:
                self._on_end(by_pid[ended.pid], ended)

    def _on_end(self, member: Member, ended: wire.Ended) -> None:
        self._drain(member)
        finished = member.state in (State.RETURNED, State.FAILED)
        member.state = State.GONE
        self._console.close(member.rank)
        if finished or member.told:
            return
        member.record = failure.Record(
            rank=member.rank,
            time=time.monotonic(),
            exit_status=ended.status,
            stack=member.stack(),
            max_rss_bytes=ended.max_rss_bytes,
            evidence=system.explain_kill(ended.status, self._oom_kills),
        )
        if self._ending is None:
            self._end(grace_s=GRACE_S)

    def _drain(self, member: Member) -> None:
        """Read what the worker left behind; a grandchild may hold the pipes open for ever."""
        while not member.hung_up and _is_readable(member.channel.fileno()):
            self._on_message(member)
        self._hang_up(member)
        for fd in tuple(member.pipes):
            while fd in member.pipes and _is_readable(fd):
                self._on_output(member, fd)
            if fd in member.pipes:
                self._selector.unregister(fd)

    def _hang_up(self, member: Member) -> None:
        if not member.hung_up:
            member.hung_up = True
            self._selector.unregister(member.channel)

    # ---- ending

    def _end(self, *, grace_s: float) -> None:
        self._ending = Ending(self.members, grace_s=grace_s, ask_stacks=True)

    # ---- interrupts

    @contextlib.contextmanager
    def _wakeable(self) -> Iterator[int]:
        """Let an interrupt of the notebook wake `select` instead of raising in the middle."""
        woken, waker = os.pipe()
        os.set_blocking(woken, False)
        main = threading.current_thread() is threading.main_thread()

        def on_interrupt(signum: int, frame: Any) -> None:
            os.write(waker, b"i")

        before = signal.signal(signal.SIGINT, on_interrupt) if main else None
        try:
            yield woken
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            os.close(woken)
            os.close(waker)


def _is_readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))
