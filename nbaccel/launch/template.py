"""Workers forked from the template process: the notebook's side."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence

from nbaccel.errors import StartupFailed
from nbaccel.launch import warmup, wire
from nbaccel.launch.sharing import memory
from nbaccel.launch.worker import Ends

READY_TIMEOUT_S = 120.0  # importing torch from a cold disk can take most of a minute
_FORK_TIMEOUT_S = 20.0


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    boot = warmup.current()
    if boot is not None and fds:  # one that is still importing closes them when it is through
        channel = wire.Channel(boot.socket.dup())
        with contextlib.suppress(OSError):  # it is going down: then the last reference is ours
            channel.send(wire.Dispose(), fds)
        channel.close()
    memory.close_all(fds)


class TemplateStarter:
    """Starts workers by asking the template process to fork. See `starter.Starter`."""

    name = "template"

    def __init__(self) -> None:
        self._boot = warmup.start()
        # A copy of the descriptor: closing this starter must not hang up on the template.
        self._channel = wire.Channel(self._boot.socket.dup())
        self._tickets = 0
        self._ended: list[wire.Ended] = []
        if not self._boot.ready:
            self._receive(wire.Ready, READY_TIMEOUT_S)
            self._boot.ready = True

    def start(self, ends: Ends) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        self._tickets += 1
        try:
            self._channel.send(wire.Fork(self._tickets), ends.all())
        except OSError as error:
            raise self._gone() from error
        forked = self._receive(wire.Forked, _FORK_TIMEOUT_S)
        return int(forked.pid)

    def sentinels(self) -> Sequence[int]:
        """The channel on which the template tells of ended workers."""
        return [self._channel.fileno()]

    def collect(self) -> Sequence[wire.Ended]:
        """Workers that have ended since the last call."""
        while self._readable(0.0):
            self._ended.append(self._next())
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Close this copy of the channel; the template stays."""
        self._channel.close()

    def _receive(self, kind: type, timeout_s: float) -> wire.Forked:
        """The next message of one kind; news of ended workers are kept for `collect`."""
        deadline = time.monotonic() + timeout_s
        while self._readable(deadline - time.monotonic()):
            message = self._next()
            if isinstance(message, kind):
                return message  # type: ignore[return-value]
            self._ended.append(message)
        warmup.stop()
        raise StartupFailed(
            f"The template process did not answer within {timeout_s:.0f} s, so no worker could be "
            "started. The machine may be overloaded or swapping; it has been ended, and the next "
            "launch starts a new one."
        )

    def _readable(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._channel.fileno()], [], [], max(0.0, timeout_s))
        return bool(ready)

    def _next(self) -> wire.Ended:
        try:
            message, _ = self._channel.receive()
        except EOFError as error:
            raise self._gone() from error
        return message  # type: ignore[no-any-return]

    def _gone(self) -> StartupFailed:
        said = self._boot.error_text().strip() or "nothing; it may have been killed"
        warmup.stop()
        return StartupFailed(
            f"The template process has ended, and its workers with it. It said: {said[-2000:]}\n"
            "Run the cell again: the next launch starts a new one."
        )
