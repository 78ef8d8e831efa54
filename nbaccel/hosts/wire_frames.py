"""What the relay and an agent tell each other: records for `secure_link`.

    relay ──► agent    Welcome, Ping, BindStore, ForkWorker, SignalWorker, KillWorker, Forget,
                       LookAtWorkers
          ◄──          a dict of facts (plain values, for any version), AgentReady, Pong,
                       StoreBound, WorkerForked, WorkerEnded, Output, WorkersSeen
          ◄─►          Packet, PacketsTaken, OutputTaken, NewFile, ChannelClosed

A *worker* is named by a number that the relay gives it; so is a channel, and a worker's first
channel has the worker's number. Files have even numbers if they are copies of the notebook's, and
odd ones if they come from a host. Times are seconds of CLOCK_MONOTONIC of the sender's machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.workers.messaging import Ended
from nbaccel.workers.resource_use import ProcessUse

__all__ = [
    "AgentReady",
    "BindStore",
    "ChannelClosed",
    "FileCopy",
    "Forget",
    "ForkWorker",
    "KillWorker",
    "NewFile",
    "Output",
    "OutputTaken",
    "Packet",
    "PacketsTaken",
    "Ping",
    "PollWorkers",
    "Pong",
    "SecondChannel",
    "SignalWorker",
    "StoreBound",
    "StoreListener",
    "Welcome",
    "WorkerEnded",
    "WorkerForked",
    "WorkersSeen",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The agent is accepted: import what workers need."""

    device: str
    """The device whose library is imported, too; empty for none."""
    in_notebook: bool
    """Whether cells will be run."""


@dataclass(frozen=True, slots=True)
class AgentReady:
    """The agent can fork workers."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Say what time it is."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer."""

    sent_at: float
    time: float


@dataclass(frozen=True, slots=True)
class BindStore:
    """Listen for the rendezvous store, whose server a worker here will be."""

    port: int | None


@dataclass(frozen=True, slots=True)
class StoreBound:
    """It listens; or why not."""

    address: str
    port: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ForkWorker:
    """Fork a worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """It has been forked."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """It is gone, and all that it has printed and said has been sent."""

    worker: int
    ended: Ended


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send it a signal."""

    worker: int
    signal: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End it with all that it has started; what it has printed and nobody reads may be lost."""

    worker: int


@dataclass(frozen=True, slots=True)
class PollWorkers:
    """Say what the workers of this host use."""


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """The answer: what each uses, by its number."""

    uses: tuple[tuple[int, ProcessUse], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What it has written to a pipe; nothing if that is closed."""

    worker: int
    stream: int
    content: bytes


@dataclass(frozen=True, slots=True)
class OutputTaken:
    """So many bytes of it have been passed on: as many more may be sent."""

    worker: int
    stream: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file whose bytes follow; those that do not are zero."""

    number: int
    name: str
    num_bytes: int
    ticket: str = ""
    """Under which the engine has handed the host a copy already, whose bytes do not follow."""


@dataclass(frozen=True, slots=True)
class Forget:
    """These files are of no more use."""

    files: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileCopy:
    """In the place of a descriptor: the file with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class SecondChannel:
    """In the place of a descriptor: the end of a new channel with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class StoreListener:
    """In the place of a descriptor: the socket on which the agent listens for the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A packet of a worker's channel, as `workers.messaging` packs it."""

    channel: int
    content: bytes
    attached: tuple[FileCopy | SecondChannel | StoreListener, ...] = ()
    """What stands for its descriptors."""
    staging: tuple[tuple[str, int], ...] = ()
    """Keys of arenas, and the numbers of their staging files, of those that come with it."""
    ends_staging: bool = False
    topology: str = ""
    """The worker's place, if the message assigns it one."""


@dataclass(frozen=True, slots=True)
class PacketsTaken:
    """So many packets of a channel have been passed on: as many more may be sent."""

    channel: int
    num_packets: int


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The process on this side has closed its end."""

    channel: int
