"""One worker, as the notebook process sees it."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.frames import Frame
from nbaccel.base.leftovers import LeftoverFolders
from nbaccel.base.processes import explain_kill
from nbaccel.transfer import memfd
from nbaccel.workers import failure, messaging
from nbaccel.workers.failure import FailureRecord
from nbaccel.workers.messaging import STACK_SIGNAL, Channel, WorkerEnds
from nbaccel.workers.starters import Starter

_CRASH_HEADING = "Fatal Python error"  # how faulthandler begins a report of a crash


class HandleState(enum.Enum):
    """How far a worker has come. In a pool it goes back to RUNNING with each call."""

    FORKED = "forked; has sent no message yet"
    ALIVE = "runs Python and listens to signals; unpacks its job"
    RUNNING = "has called the user's function"
    RETURNED = "has handed over its result; its weights are in the staging files, or in its memory"
    FAILED = "has handed over its exception"
    GONE = "has ended and been reaped"


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """A worker's connections, and everything known of it and of its current call."""

    rank: int
    channel: Channel
    pipes: dict[int, str]
    """The notebook's reading ends → `stdout`, `stderr` or `stack`."""
    pid: int
    sentinel: int
    """Descriptor that can be read once the process may have ended."""
    starter: Starter
    is_fork: bool
    """It comes from the notebook's process, and handles `STACK_SIGNAL` from its start."""
    control: Channel | None = None
    """A second channel, to a worker of a pool, whose second thread answers while a cell runs."""
    state: HandleState = HandleState.FORKED
    forked_at: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    returned: messaging.Returned | None = None
    result_fd: int | None = None
    record: FailureRecord | None = None
    error: tuple[messaging.Failed, int | None] | None = None
    """The message and the descriptor of its exception's payload."""
    whereabouts: messaging.Whereabouts | None = None
    """Where a pool's worker was by its latest answer."""
    stack_text: str = ""
    """What faulthandler has written since it was last read."""
    hung_up: bool = False
    """Its end of the channel is closed, or it is gone: no further messages."""
    leftovers: set[LeftoverFolders] = field(default_factory=set)
    is_stopped: bool = False
    """The notebook has stopped its call, so how it ends says nothing about the user's code."""

    @property
    def has_ended(self) -> bool:
        """Whether it is gone and reaped."""
        return self.state is HandleState.GONE

    @property
    def is_busy(self) -> bool:
        """Whether its function may still be running."""
        return self.state in (HandleState.FORKED, HandleState.ALIVE, HandleState.RUNNING)

    @property
    def stack(self) -> tuple[Frame, ...]:
        """Its main thread's stack by its latest answer, innermost call first."""
        if self.whereabouts is not None:
            return self.whereabouts.stack
        return failure.parse_stack(self.stack_text)

    @property
    def has_crashed(self) -> bool:
        """Whether faulthandler has written why it dies."""
        return _CRASH_HEADING in self.stack_text

    # ---- what is known of it

    def note(self, message: messaging.Leaves) -> None:
        """Note what it would leave on disk, or that it has removed it."""
        if message.is_there:
            self.leftovers.add(message.leftover)
        else:
            self.leftovers.discard(message.leftover)

    def forget_call(self) -> None:
        """Drop what is known of its last call."""
        self._close_payloads()
        self.returned = self.record = self.whereabouts = None
        self.is_stopped = False

    def begin_call(self) -> None:
        """It has a call."""
        self.since = time.monotonic()
        # A worker that has not reported stays FORKED, so the limit for its first message holds.
        if self.state is not HandleState.FORKED and not self.has_ended:
            self.state = HandleState.RUNNING

    def take_result(self, message: messaging.Returned, descriptors: list[int]) -> None:
        """It has handed over what its function returned."""
        self.returned = message
        self.result_fd = descriptors[0] if descriptors else None

    def take_failure(
        self, message: messaging.Failed, descriptors: list[int], record: FailureRecord
    ) -> None:
        """It has handed over what its function raised."""
        self.error = (message, descriptors[0] if descriptors else None)
        self.record = record

    def finish_call(self) -> None:
        """Its call has ended; one that has handed over nothing has no value."""
        self.state = HandleState.RETURNED if self.error is None else HandleState.FAILED
        if self.error is None and self.returned is None:
            self.returned = messaging.Returned()
        self.since = time.monotonic()

    def end(self, record: FailureRecord | None = None, *, loses_result: bool = False) -> None:
        """It is gone and reaped."""
        self.state = HandleState.GONE
        self.record = record or self.record
        if loses_result:
            self.returned = None

    def record_of_death(self, ended: messaging.Ended, oom_kills: int) -> FailureRecord:
        """The record of it if it has just ended by itself."""
        _, heading, dump = self.stack_text.rpartition(_CRASH_HEADING)
        return FailureRecord(
            rank=self.rank,
            time=time.monotonic(),
            exit_status=ended.status,
            stack=failure.parse_stack(dump) if heading else (),
            max_rss_bytes=ended.max_rss_bytes,
            evidence=explain_kill(ended.status, oom_kills),
            doing=f"ended: {failure.as_clause(ended.because)}" if ended.because else "",
            remedy=ended.remedy,
        )

    def record_of_stop(self) -> FailureRecord:
        """The record of it if it did nothing wrong, and was stopped for something else."""
        had_started = self.control is not None or bool(self.stack_text)
        doing = f"was {failure.RankActivity.of_stack(self.stack)} when nbaccel stopped it"
        return FailureRecord(
            rank=self.rank,
            # Never the first failure: it was stopped because of another one.
            time=float("inf"),
            doing=doing if had_started else "had not started",
            stack=self.stack,
        )

    # ---- what is done to it

    def tell(self, message: Any) -> None:
        """Send it a message; it may have ended, which its sentinel says."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def ask_where(self) -> bool:
        """Ask where it is, or let faulthandler write it; returns whether it can answer."""
        if self.control is not None and self.state is not HandleState.FORKED:
            self._tell_second_thread(messaging.Word.ASK_WHEREABOUTS)
            return True
        # A process that does not handle the signal would be killed by it.
        can_answer = self.is_fork or self.state is not HandleState.FORKED
        if can_answer:
            self._signal(STACK_SIGNAL)
        return can_answer

    def interrupt(self) -> None:
        """Let it raise KeyboardInterrupt; one that was stopped (SIGSTOP) continues."""
        self.is_stopped = True
        # In this order: a stopped process keeps the signal pending and handles it once it
        # continues.
        self._signal(signal.SIGINT)
        self._signal(signal.SIGCONT)

    def cut_connections(self) -> None:
        """Let a collective fail that it waits in; for a worker of a pool."""
        self._tell_second_thread(messaging.Word.BREAK)

    def terminate(self) -> None:
        """Ask it to end, and do not wait for `finally` blocks."""
        self.is_stopped = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with everything it has started that has not left its process group."""
        self.is_stopped = True
        self.starter.kill(self.pid)

    def let_exit(self) -> None:
        """Let it exit: its work is over."""
        self.tell(messaging.Word.LEAVE)
        # A stopped process (SIGSTOP) would not read the message.
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Close every descriptor that is left."""
        self.channel.close()
        if self.control is not None:
            self.control.close()
        memfd.close_all([self.sentinel, *self.pipes])
        self.pipes.clear()
        self._close_payloads()

    def _close_payloads(self) -> None:
        fds = (self.result_fd, self.error[1] if self.error else None)
        memfd.close_all([fd for fd in fds if fd is not None])
        self.result_fd = self.error = None

    def _signal(self, number: int) -> None:
        self.starter.signal(self.pid, number)

    def _tell_second_thread(self, word: messaging.Word) -> None:
        with contextlib.suppress(OSError):
            if self.control is not None:
                self.control.send(word)


def connect() -> tuple[Channel, dict[int, str], WorkerEnds]:
    """A worker's connections: the notebook's ends, and the worker's, which the caller closes."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    channel, worker_end = Channel.pair()
    pipes: dict[int, str] = {}
    worker_ends = {}
    for name in ("stdout", "stderr", "stack"):
        read_end, worker_ends[name] = os.pipe()
        # The notebook reads until a pipe is empty; a blocking read would stop all other work.
        os.set_blocking(read_end, False)
        # A megabyte, so that a worker that prints a lot seldom waits. The user's quota of pipe
        # memory may be used up: the default of 64 KiB stays.
        with contextlib.suppress(OSError):
            fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, 1 << 20)
        pipes[read_end] = name
    return channel, pipes, WorkerEnds(channel=worker_end.detach(), **worker_ends)
