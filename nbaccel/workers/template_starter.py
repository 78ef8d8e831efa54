"""Workers forked from the template process: the notebook's side."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence

from nbaccel.base.errors import StartupFailed
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template, time_limits
from nbaccel.workers.messaging import WorkerEnds
from nbaccel.workers.start_method import Starter


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    ready = [process for process in template.running() if process.ready]
    try:
        if ready and fds:
            # OSError: the template ends, or no descriptor is left for the copy. The descriptors are
            # closed below in any case.
            with (
                contextlib.suppress(OSError),
                contextlib.closing(messaging.Channel(ready[0].socket.dup())) as channel,
            ):
                channel.send(messaging.Dispose(), fds)
    finally:
        memfd.close_all(fds)


def go_on() -> None:
    """Let template processes continue if they were stopped (SIGSTOP): they reap the workers."""
    for process in template.running():
        process.let_continue()


class TemplateStarter(Starter):
    """Starts workers by asking a template process to fork."""

    def __init__(
        self, device: str, *, threads: int = 0, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._template = template.template_for(device)
        self._threads = threads
        self._say = say
        self._pids: set[int] = set()
        self._connect()

    def start(self, ends: WorkerEnds) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        try:
            return self._fork(ends)
        except StartupFailed:
            # It was killed, or it hangs: nothing is lost as long as it has no workers.
            if self._pids:
                raise
            self.close()
            self._connect()
            return self._fork(ends)

    def collect(self) -> Sequence[messaging.Ended]:
        """Workers of this starter that have ended since the last call."""
        with self._process.hearing:
            while self._readable(0.0):
                self._note(self._next())
            reports = self._process.ended
            ended = [reports[pid] for pid in self._pids if reports[pid] is not None]
            self._forget(one.pid for one in ended)
        return ended

    def sentinel(self, pid: int) -> int:
        """A pidfd; where a sandbox forbids them, the channel by which the template reports ends."""
        try:
            return super().sentinel(pid)
        except (AttributeError, OSError):
            return os.dup(self._channel.fileno())

    def close(self) -> None:
        """Close this copy of the channel; the template stays."""
        if self._channel.fileno() >= 0:
            self._forget(tuple(self._pids))
            self._channel.close()
            self._process.release()

    def _connect(self) -> None:
        self._process = self._template.wait(self._say)
        # A copy of the descriptor: closing this starter must not hang up on the template.
        self._channel = messaging.Channel(self._process.socket.dup())
        self._process.use()
        # Someone may have stopped it (SIGSTOP).
        self._process.let_continue()

    def _fork(self, ends: WorkerEnds) -> int:
        # Only one starter reads at a time, and keeps what it reads of the other's workers.
        with self._process.hearing:
            try:
                self._channel.send(messaging.Fork(self._threads), ends.all())
            except OSError as error:
                raise self._gone() from error
            pid = self._forked()
            self._pids.add(pid)
            # An entry marks a worker as waited for; see `_note`.
            self._process.ended[pid] = None
        return pid

    def _forked(self) -> int:
        """The process id of the worker; reports of ended ones are kept for `collect`."""
        deadline = time.monotonic() + time_limits.FORK_S
        while (left_s := deadline - time.monotonic()) > 0:
            if not self._readable(min(left_s, template.SAY_EVERY_S)):
                self._say("a new process")
                continue
            message = self._next()
            if isinstance(message, messaging.Forked):
                return message.pid
            self._note(message)
        self._template.drop(self._process)
        raise template.no_answer(time_limits.FORK_S)

    def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._pids.discard(pid)
            self._process.ended.pop(pid, None)

    def _note(self, message: object) -> None:
        """Keep a report about a worker that a starter still waits for; drop any other."""
        if isinstance(message, messaging.Ended) and message.pid in self._process.ended:
            self._process.ended[message.pid] = message

    def _readable(self, timeout_s: float) -> bool:
        readable, _, _ = select.select([self._channel.fileno()], [], [], timeout_s)
        return bool(readable)

    def _next(self) -> object:
        try:
            message, _ = self._channel.receive()
        except EOFError as error:
            raise self._gone() from error
        return message

    def _gone(self) -> StartupFailed:
        error = self._process.explain_end()
        self._template.drop(self._process)
        self.status = self._process.status
        return error
