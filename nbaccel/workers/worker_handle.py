"""One worker, as the notebook process sees it."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from dataclasses import dataclass, field

from nbaccel.base import frames
from nbaccel.base.leftovers import LeftoverFolders
from nbaccel.transfer import memfd
from nbaccel.workers import failure, messaging
from nbaccel.workers.messaging import STACK_SIGNAL, WorkerEnds
from nbaccel.workers.start_method import Starter

_CRASH_HEADING = "Fatal Python error"  # how faulthandler begins a report of a crash


class HandleState(enum.Enum):
    """How far a worker has come. In a pool it goes back to RUNNING with each call."""

    FORKED = "forked; has sent no message yet"
    ALIVE = "runs Python and listens to signals; unpacks its job"
    RUNNING = "has called the user's function"
    RETURNED = "has handed over its result; its weights are in the staging files, or in its memory"
    FAILED = "has handed over its exception"
    GONE = "has ended and been reaped"


@dataclass(kw_only=True)
class WorkerHandle:
    """A worker's connections, and everything known of it and of its current call.

    Other code reads the attributes; only this class's methods change them.
    """

    rank: int
    channel: messaging.Channel
    pipes: dict[int, str]
    """The notebook's reading ends → `stdout`, `stderr` or `stack`."""
    pid: int
    starter: Starter
    """Who started it, and reaches it with signals."""
    tells_its_stack: bool = False
    """It handles `STACK_SIGNAL`; a process that does not would be killed by it."""
    control: messaging.Channel | None = None
    """A second channel, to a worker of a pool, whose second thread answers while a cell runs."""
    state: HandleState = HandleState.FORKED
    forked_at: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    """When its latest call began, or ended."""
    returned: messaging.Returned | None = None
    result_fd: int | None = None
    record: failure.FailureRecord | None = None
    error: tuple[messaging.Failed, int | None] | None = None
    """The message and the descriptor of its exception's payload."""
    whereabouts: messaging.Whereabouts | None = None
    """Where a pool's worker was by its latest answer."""
    stack_text: str = ""
    """What faulthandler has written since it was last read."""
    hung_up: bool = False
    """Its end of the channel is closed, or it is gone."""
    leftovers: set[LeftoverFolders] = field(default_factory=set)
    """What it would leave on disk if it were killed."""
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
    def stack(self) -> tuple[frames.Frame, ...]:
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

    def note_stack(self, stack_bytes: bytes) -> None:
        """Note a part of what faulthandler writes."""
        self.stack_text += stack_bytes.decode(errors="replace")

    def forget_stack(self) -> None:
        """Drop what faulthandler has written, before it is asked again."""
        self.stack_text = ""

    def note_whereabouts(self, message: messaging.Whereabouts | None) -> None:
        """Note where it says that it is; None to drop its earlier answer."""
        self.whereabouts = message

    def hang_up(self) -> None:
        """Note that it will send no further messages."""
        self.hung_up = True

    def come_alive(self) -> None:
        """It runs Python, and answers signals."""
        self.state = HandleState.ALIVE
        self.tells_its_stack = True

    def begin_work(self) -> None:
        """It is about to call the user's function."""
        self.state = HandleState.RUNNING

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

    def take_result(self, message: messaging.Returned, file_descriptors: list[int]) -> None:
        """It has handed over what its function returned."""
        self.returned = message
        self.result_fd = file_descriptors[0] if file_descriptors else None

    def take_failure(
        self, message: messaging.Failed, file_descriptors: list[int], record: failure.FailureRecord
    ) -> None:
        """It has handed over what its function raised."""
        self.error = (message, file_descriptors[0] if file_descriptors else None)
        self.record = record

    def finish_call(self) -> None:
        """Its call has ended; one that has handed over nothing has no value."""
        self.state = HandleState.RETURNED if self.error is None else HandleState.FAILED
        if self.error is None and self.returned is None:
            self.returned = messaging.Returned(time.monotonic(), None, None, None)
        self.since = time.monotonic()

    def end(
        self, record: failure.FailureRecord | None = None, *, loses_result: bool = False
    ) -> None:
        """It is gone and reaped."""
        self.state = HandleState.GONE
        self.record = record or self.record
        if loses_result:
            self.returned = None

    def record_of_death(
        self, exit_status: messaging.Ended, oom_kills: int
    ) -> failure.FailureRecord:
        """The record of it if it has ended by itself."""
        _, crash_heading, stack_dump = self.stack_text.rpartition(_CRASH_HEADING)
        return failure.FailureRecord.of_death(
            self.rank,
            exit_status.status,
            max_rss_bytes=exit_status.max_rss_bytes,
            stack_dump=stack_dump if crash_heading else "",
            oom_kills=oom_kills,
            death_reason=exit_status.because,
            remedy=exit_status.remedy,
        )

    def record_of_stop(self) -> failure.FailureRecord:
        """The record of it if it was stopped because of something else."""
        had_started = self.control is not None or bool(self.stack_text)
        return failure.FailureRecord.of_stop(self.rank, self.stack, had_started=had_started)

    # ---- what is done to it

    def open_control(self) -> messaging.Channel:
        """Make the second channel; returns the worker's end of it."""
        self.control, worker_end = messaging.Channel.pair()
        return worker_end

    def ask_where(self) -> bool:
        """Ask where it is; returns whether it can answer."""
        if self.control is not None and self.state is not HandleState.FORKED:
            self._tell(messaging.AskWhereabouts())
            return True
        return self.ask_stack()

    def ask_stack(self) -> bool:
        """Let faulthandler write where it is; returns whether it can do so."""
        if self.tells_its_stack:
            self._signal(STACK_SIGNAL)
        return self.tells_its_stack

    def interrupt(self) -> None:
        """Let it raise KeyboardInterrupt; one that was stopped (SIGSTOP) continues."""
        self.is_stopped = True
        # In this order: a stopped process keeps the signal pending and handles it once it
        # continues.
        self._signal(signal.SIGINT)
        self._signal(signal.SIGCONT)

    def cut_connections(self) -> None:
        """Let a collective fail that it waits in; for a worker of a pool."""
        self._tell(messaging.Break())

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
        # It may have exited by itself.
        with contextlib.suppress(OSError):
            self.channel.send(messaging.Leave())

    def wake(self) -> None:
        """Let it continue if it was stopped (SIGSTOP)."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Close every descriptor that is left."""
        self.channel.close()
        if self.control is not None:
            self.control.close()
        for file_descriptor in self.pipes:
            os.close(file_descriptor)
        self.pipes.clear()
        self._close_payloads()

    def _close_payloads(self) -> None:
        fds = (self.result_fd, self.error[1] if self.error else None)
        memfd.close_all([file_descriptor for file_descriptor in fds if file_descriptor is not None])
        self.result_fd = self.error = None

    def _signal(self, number: int) -> None:
        self.starter.signal(self.pid, number)

    def _tell(self, message: messaging.AskWhereabouts | messaging.Break) -> None:
        if self.control is not None:
            # It may have ended already; its sentinel tells.
            with contextlib.suppress(OSError):
                self.control.send(message)


def connect() -> tuple[messaging.Channel, dict[int, str], WorkerEnds]:
    """Make a worker's connections: the notebook's ends, and the worker's.

    The worker's ends are plain descriptors that the caller closes once the worker exists.
    """
    end, worker_end = messaging.Channel.pair()
    output_pipes: dict[int, str] = {}
    worker_ends = {}
    for name in ("stdout", "stderr", "stack"):
        read_end, write_end = os.pipe()
        # The notebook reads until a pipe is empty; a blocking read would stop all other work.
        os.set_blocking(read_end, False)
        _enlarge(read_end)
        output_pipes[read_end] = name
        worker_ends[name] = write_end
    return end, output_pipes, WorkerEnds(channel=worker_end.detach(), **worker_ends)


def _enlarge(file_descriptor: int) -> None:
    """Enlarge a pipe to a megabyte, so that a worker that prints a lot seldom has to wait."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    try:
        fcntl.fcntl(file_descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)
    # The user's quota of pipe memory is used up: the default of 64 KiB stays.
    except OSError:
        return
