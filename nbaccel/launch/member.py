"""One worker, as the notebook process sees it."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass, field

from nbaccel import frames
from nbaccel.launch import failure, wire
from nbaccel.launch.worker import Ends
from nbaccel.leftovers import Leftover


class State(enum.Enum):
    """How far a worker has come. Only ever moves down this list."""

    BORN = "forked; has not said a word"
    ALIVE = "runs Python and listens to signals; unpacks its job"
    RUNNING = "has called the user's function"
    RETURNED = "has handed over its result; its weights are in the staging files"
    FAILED = "has handed over its exception"
    GONE = "has ended and been reaped"


@dataclass(kw_only=True)
class Member:
    """A worker's connections, and everything known of it."""

    rank: int
    channel: wire.Channel
    pipes: dict[int, str]
    """The notebook's reading ends → `stdout`, `stderr` or `stack`."""
    pid: int
    control: wire.Channel | None = None
    """A second channel, to a worker of a pool: what it is told there it hears in mid-work."""
    state: State = State.BORN
    born: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    """When it was given its latest task, or was through with it."""
    returned: wire.Returned | None = None
    result_fd: int | None = None
    record: failure.Record | None = None
    error: tuple[wire.Failed, int | None] | None = None
    """The message and the descriptor of its exception's parcel."""
    stack_text: str = ""
    tells_its_stack: bool = False
    """It answers `STACK_SIGNAL`; to a process that does not, the signal would be deadly."""
    hung_up: bool = False
    """Its end of the channel is closed, or it is gone."""
    leftovers: set[Leftover] = field(default_factory=set)
    """What it would leave on disk if it were killed."""
    told: bool = False
    """We have sent it a signal: its death says nothing about its own doings."""

    @property
    def has_ended(self) -> bool:
        """Whether it is gone and reaped."""
        return self.state is State.GONE

    @property
    def is_busy(self) -> bool:
        """Whether its function may still be running."""
        return self.state in (State.BORN, State.ALIVE, State.RUNNING)

    def stack(self) -> tuple[frames.Frame, ...]:
        """Its main thread's stack by the latest dump, innermost call first."""
        return failure.parse_stack(self.stack_text)

    def last_words(self) -> tuple[frames.Frame, ...]:
        """Where it was when it crashed; nothing if it did not, whatever it was asked before."""
        _, crash, dump = self.stack_text.rpartition("Fatal Python error")
        return failure.parse_stack(dump) if crash else ()

    def note(self, message: wire.Leaves) -> None:
        """Note what it would leave on disk, or would no more."""
        if message.is_there:
            self.leftovers.add(message.leftover)
        else:
            self.leftovers.discard(message.leftover)

    def close(self) -> None:
        """Close every descriptor that is left."""
        self.channel.close()
        if self.control is not None:
            self.control.close()
        for fd in self.pipes:
            os.close(fd)
        self.pipes.clear()
        parcels = (self.result_fd, self.error[1] if self.error else None)
        for held in parcels:
            if held is not None:
                os.close(held)
        self.result_fd = self.error = None


def connect() -> tuple[wire.Channel, dict[int, str], Ends]:
    """Make a worker's connections: the notebook's ends, and the worker's.

    The worker's ends are plain descriptors that the caller closes once the worker exists.
    """
    ours, theirs = wire.Channel.pair()
    pipes: dict[int, str] = {}
    ends = {}
    for name in ("stdout", "stderr", "stack"):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        _enlarge(reading)
        pipes[reading] = name
        ends[name] = writing
    return ours, pipes, Ends(channel=theirs.detach(), **ends)


def _enlarge(fd: int) -> None:
    """Ask for a megabyte, so that a worker that prints a lot seldom waits for the notebook."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    except OSError:
        return  # the user's quota of pipe memory is used up: 64 KiB it stays
