"""Workers forked from the template process: the notebook's side."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence

from nbaccel.errors import StartupFailed
from nbaccel.launch import failure, warmup, wire
from nbaccel.launch.sharing import memory
from nbaccel.launch.worker import Ends

READY_TIMEOUT_S = 120.0  # importing torch from a cold disk can take most of a minute
_FORK_TIMEOUT_S = 20.0


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    boot = warmup.current()
    try:
        if boot is not None and fds:  # one that is still importing closes them when it is through
            # It goes down, or no descriptor is left for the copy: then the last reference is ours.
            with (
                contextlib.suppress(OSError),
                contextlib.closing(wire.Channel(boot.socket.dup())) as channel,
            ):
                channel.send(wire.Dispose(), fds)
    finally:
        memory.close_all(fds)


def go_on() -> None:
    """Let the template process go on if somebody has stopped it (SIGSTOP): it reaps the workers."""
    pid = warmup.current_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class TemplateStarter:
    """Starts workers by asking the template process to fork. See `starter.Starter`."""

    name = "template"

    def __init__(self) -> None:
        self._boot = warmup.start()
        # A copy of the descriptor: closing this starter must not hang up on the template.
        self._channel = wire.Channel(self._boot.socket.dup())
        self.status: int | None = None
        """How the template process ended, if it did so by itself."""
        self._tickets = 0
        self._pids: set[int] = set()
        try:
            with self._boot.hearing:
                if not self._boot.ready:
                    self._receive(wire.Ready, READY_TIMEOUT_S)
                    self._boot.ready = True
        except BaseException:  # an interrupt too must not cost a descriptor
            self._channel.close()
            raise

    def start(self, ends: Ends) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        self._tickets += 1
        with self._boot.hearing:
            try:
                self._channel.send(wire.Fork(self._tickets), ends.all())
            except OSError as error:
                raise self._gone() from error
            pid = int(self._receive(wire.Forked, _FORK_TIMEOUT_S).pid)
            self._pids.add(pid)
            self._boot.ended[pid] = None
        return pid

    def sentinels(self) -> Sequence[int]:
        """The channel on which the template tells of ended workers."""
        return [self._channel.fileno()]

    def collect(self) -> Sequence[wire.Ended]:
        """Workers of this starter that have ended since the last call."""
        with self._boot.hearing:
            while self._readable(0.0):
                self._note(self._next())
            ended = [self._boot.ended[pid] for pid in self._pids if self._boot.ended[pid]]
            self._forget(found.pid for found in ended)
        return ended

    def close(self) -> None:
        """Close this copy of the channel; the template stays."""
        self._forget(tuple(self._pids))
        self._channel.close()

    def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._pids.discard(pid)
            self._boot.ended.pop(pid, None)

    def _note(self, message: object) -> None:
        """News of a worker that nobody waits for any more are dropped."""
        if isinstance(message, wire.Ended) and message.pid in self._boot.ended:
            self._boot.ended[message.pid] = message

    def _receive(self, kind: type, timeout_s: float) -> wire.Forked:
        """The next message of one kind; news of ended workers are kept for `collect`."""
        deadline = time.monotonic() + timeout_s
        while self._readable(deadline - time.monotonic()):
            message = self._next()
            if isinstance(message, kind):
                return message  # type: ignore[return-value]
            self._note(message)
        warmup.stop()
        raise StartupFailed(
            f"The template process did not answer within {timeout_s:.0f} s, so no worker could be "
            "started. The machine may be overloaded or swapping; it has been ended, and the next "
            "launch starts a new one."
        )

    def _readable(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._channel.fileno()], [], [], max(0.0, timeout_s))
        return bool(ready)

    def _next(self) -> object:
        try:
            message, _ = self._channel.receive()
        except EOFError as error:
            raise self._gone() from error
        return message

    def _gone(self) -> StartupFailed:
        said = self._boot.error_text().strip()[-2000:]
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has hung up, and is about to end
            self._boot.process.wait(timeout=1.0)
        warmup.stop()
        self._boot.end()  # another template may run by now
        self.status = self._boot.status
        how = "was ended on request (nbaccel.shutdown, or the end of this process)"
        if self.status is not None:
            how = failure.name_exit(self.status).removesuffix(" before the function returned")
        return StartupFailed(
            f"The process that workers are forked from {how}, and its workers ended with it.\n"
            + (f"It said: {said}\n" if said else "")
            + "Run the cell again: the next launch starts a new one."
        )
