"""Typed messages between processes, over Unix sockets that no one else can reach.

    notebook process ── channel ──► template process      Fork; by another one each worker's Ended
    notebook process ── channel ──► worker (one each)     Job → Alive, Started, …, Returned | Failed

Sockets are of type SEQPACKET: a message arrives whole or not at all, with the descriptors that
belong to it. What is too long for one packet travels in a memory file.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import pickle
import select
import signal
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbaccel.base.atomic import LeftoverFolders
from nbaccel.base.frames import Frame
from nbaccel.plan.topology import Topology
from nbaccel.transfer import memfd
from nbaccel.transfer.memfd import PackedObject
from nbaccel.workers import time_limits
from nbaccel.workers.failure import FailureRecord

STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # macOS has none, and no workers either
"""Makes a worker write its stack; user code is unlikely to use this signal."""

_PACKET_BYTES = 32 * 1024  # well under the kernel's limit for one packet (net.core.wmem_default)
_MAX_FDS = 250  # the kernel's limit SCM_MAX_FD is 253; one is left for the memory file
_IN_PACKET = b"p"
IN_FILE = b"f"


class Channel:
    """One end of a two-way connection that carries messages and descriptors."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def from_fd(cls, fd: int, *, waits: bool = True) -> Channel:
        """Take over an end that came from another process."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd)
        # By the socket: `send_fds` and `recv_fds` of Python 3.11 ignore their flags.
        end.setblocking(waits)
        return cls(end)

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Give the descriptor away; the channel cannot be used any more."""
        return self._socket.detach()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message with copies of the descriptors; they may be closed right after."""
        packet, files = pack_message(message)
        with memfd.closing_files(*files):
            self.send_packet(packet, [*descriptors, *files])

    def send_in_turn(self, message: Any) -> None:
        """Send what belongs between two lines of output, and wait until those before it are read.

        Output takes another way, on which it would overtake the message: of
        ``clear_output(); print(loss)`` the loss would be cleared.
        """
        waiting, taken = os.pipe()
        with memfd.closing_files(waiting):
            with memfd.closing_files(taken):
                self.send(message, [taken])
            # Readable when the reader has closed its copy, too.
            wait([waiting], time_limits.DISPLAY_S)

    def send_packet(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        """Send what `pack_message` made of a message; False where this end would have to wait."""
        if len(descriptors) > _MAX_FDS + 1:
            raise ValueError(f"{len(descriptors)} descriptors in one message; at most {_MAX_FDS}")
        try:
            socket.send_fds(self._socket, [packet], list(descriptors))
        except BlockingIOError:
            return False
        return True

    def try_send(self, message: Any) -> bool:
        """Send a short message unless that would mean to wait."""
        packet = _IN_PACKET + pickle.dumps(message, protocol=5)
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for the next message; the descriptors are the caller's to close."""
        packet, descriptors = self.receive_packet()
        files = descriptors[-1:] if packet == IN_FILE else []
        with memfd.closing_files(*files):
            message = peek_packet(packet, descriptors)
        return message, descriptors[: len(descriptors) - len(files)]

    def receive_packet(self) -> tuple[bytes, list[int]]:
        """The next message, packed as a process leaves it that passes it on."""
        # The kernel reports once, before its last messages, that the peer has not read all of ours.
        with contextlib.suppress(ConnectionResetError):
            return self._receive_once()
        return self._receive_once()

    def _receive_once(self) -> tuple[bytes, list[int]]:
        packet, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES + 1, _MAX_FDS + 1)
        if not packet:
            raise EOFError("the other process closed its end")
        return packet, descriptors

    def close(self) -> None:
        """Close this end; the other one reads an end of file."""
        self._socket.close()


class WorkerEnds(NamedTuple):
    """The worker's ends of its connections: descriptors, in the order in which they travel."""

    channel: int
    stdout: int
    stderr: int
    stack: int


def peek_packet(packet: bytes, descriptors: Sequence[int]) -> Any:
    """The message in a packet: nothing is taken off or closed."""
    if packet[:1] == _IN_PACKET:
        return pickle.loads(packet[1:])
    # From a mapping and not by reading: the file's offset is shared with whoever reads it next.
    with mmap.mmap(descriptors[-1], 0, access=mmap.ACCESS_READ) as content:
        return pickle.loads(content)


def pack_message(message: Any) -> tuple[bytes, list[int]]:
    """A message as a packet, and the descriptor, to be sent last, of the file of a long one."""
    content = pickle.dumps(message, protocol=5)
    if len(content) <= _PACKET_BYTES:
        return _IN_PACKET + content, []
    file = memfd.create_file("message", len(content))
    with memfd.closed_on_error(file):
        memfd.write_at(file, memoryview(content), 0)
    return IN_FILE, [file]


def wait(descriptors: Iterable[int], limit_s: float = 0.0) -> list[int]:
    """Wait until some can be read; returns these."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(limit_s * 1000)]


class Word(enum.Enum):
    """The messages that are no more than one of these."""

    DISPOSE = "to the template: close the descriptors that come along; freeing much takes time"
    LEAVE = "to a worker: exit; see [Note: exit barrier] in `calls.supervisor`"
    STOP_AT_STEP = "to a worker: stop where a step ends, the same one on all ranks: see `step_stop`"
    ASK_WHEREABOUTS = "to a pool's worker, whose second thread answers by Whereabouts"
    BREAK = "to it, too: cut the connections, which ends a collective that would never end"
    ALIVE = "from a worker: it runs Python code and listens to signals"
    STARTED = "from a worker: the user's function is about to be called"
    INTERRUPTING = "from a worker: it has raised KeyboardInterrupt and is unwinding: give it time"


# ---- notebook → template


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a worker. Descriptors: its `WorkerEnds`, and a channel for its number and its end."""

    threads: int  # how many it will compute with; 0: not known yet


# ---- template → notebook


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker is gone and reaped."""

    pid: int
    status: int  # as `os.waitstatus_to_exitcode` gives it: negative for a signal
    max_rss_bytes: int
    because: str = ""  # a sentence beyond the status: the process it came from has ended
    remedy: str = ""  # what can be done, where that does not follow from the status


# ---- notebook → worker


@dataclass(frozen=True, kw_only=True)
class FileHints:
    """What a message means for memory files, for a process that copies them to another host."""

    staging: tuple[str, ...] = ()  # keys of the arenas whose staging files come, in order
    arenas: tuple[str, ...] = ()  # keys of the arenas that come with it, in their order
    reads_arenas: bool = False  # will the worker read what the notebook has written to them?
    forgets: tuple[str, ...] = ()  # keys of arenas that are of no more use
    ends_staging: bool = False  # whether staging files that came before are of no more use


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAssignment:
    """The first message to a worker. Descriptor: the socket of the store, if it serves that."""

    handler: str  # what the worker runs once it has this, as module:function
    place: Topology
    device: str
    mixed_precision: str
    share_back: bool
    threads: int
    environment: dict[str, str]  # all of the notebook's, and this worker's variables
    working_directory: str
    import_path: tuple[str, ...]
    serves_store: bool  # does it serve the store, on the listening socket that comes along?
    random_states: bytes
    staging_rank: int  # its number among those that share staging files; 0 writes whole tensors
    num_notebooks: int = 1
    has_cells: bool = False  # whether the notebook's cells can show a panel
    on_other_host: bool = False  # are environment and paths laid over those of its host?


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call to make. Descriptors: arenas, their staging files, the payload's."""

    arenas: tuple[tuple[str, int], ...]  # key and size in bytes of each arena
    payload: PackedObject | None  # the pickled `WorkerCall`; None for a fork, which has it
    random_states: bytes
    settings: bytes  # settings of loggers and libraries; see `transfer.library_settings`
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def hints(self) -> FileHints:
        """What it means for memory files."""
        keys = tuple(key for key, _ in self.arenas)
        return FileHints(staging=keys, arenas=keys, reads_arenas=True)


@dataclass(frozen=True)
class PoolTask:
    """A method of a pool's `CellWorker`, by its name, and what it is given."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    hints: FileHints = field(default_factory=FileHints)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to do. Descriptors: what its body says. No slots: these would pickle slowly."""

    number: int  # counts the tasks that are sent together; 0 for one that is not waited for
    body: Any
    resting: tuple[int, ...] = ()  # ranks that are not given it


@dataclass(frozen=True, slots=True)
class GoOnTo:
    """Stop at this boundary between steps. Answered by AtStep until it is agreed."""

    number: float  # infinite: not at all, since another rank has ended
    is_agreed: bool = False  # whether all ranks have been before it when they heard of it


# ---- worker → notebook


@dataclass(frozen=True, slots=True)
class Display:
    """Rich output: what `IPython.display.display` would have published. See `send_in_turn`."""

    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """`IPython.display.clear_output`. See `send_in_turn`."""

    wait: bool


@dataclass(frozen=True, slots=True)
class AtStep:
    """How far the worker is."""

    number: int  # boundaries between steps that it has reached since its function began


@dataclass(frozen=True, slots=True)
class Leaves:
    """What the worker would leave on disk if it were killed."""

    leftover: LeftoverFolders
    is_there: bool

    def note_in(self, leftovers: set[LeftoverFolders]) -> None:
        """Add it, or take off what the worker has removed."""
        if self.is_there:
            leftovers.add(self.leftover)
        else:
            leftovers.discard(self.leftover)


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned. Descriptors: the payload with the value if it has one; `whole`."""

    payload: PackedObject | None = None
    unsendable: str | None = None  # why the value could not be sent, if so
    weight_report: Any = None  # `WeightReport`: which trained weights lie in the staging files
    was_stopped: bool = False  # whether it was stopped where a step ended, as all ranks
    whole: tuple[str, ...] = ()  # keys of the arenas that files of this rank's own hold completely


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised. Descriptor: the payload with the exception, if it could be sent."""

    record: FailureRecord
    payload: PackedObject | None


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where the main thread is, and what the worker has in memory."""

    stack: tuple[Frame, ...]  # innermost call first; empty if it waits for a task
    device_bytes: int | None  # what torch has reserved on this worker's device; None on a CPU
    names: tuple[str, ...] = ()  # that cells have defined, or were sent; not all of very many
    group: str = ""  # the process group that it has joined: `gloo, 2 ranks`; empty for none


# ---- a pool's worker → notebook; without slots, as of `Task`


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWanted:
    """This rank is about to join the default process group and will wait for all others."""

    generation: int = 0
    ordinal: int = 0  # how many default groups this rank has been in since the generation began
    backend: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What could stand in the code from `start` to `end`."""

    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...]  # of each match: `function`, …; empty where IPython cannot tell


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The task of this number is done: the worker waits for the next one."""

    number: int = 0
    whereabouts: Whereabouts  # what it has in memory now; its stack is empty
    shown: Any = None  # what the task gives the user to see: a mime bundle, completions
    bound: tuple[str, ...] = ()  # names that the task bound or deleted
    dirty: tuple[str, ...] = ()  # keys of modules whose weights may have changed
    sequence: tuple[tuple[str, int], ...] = ()  # how many collectives each process group has begun
