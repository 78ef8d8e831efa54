"""Messages between the notebook and its relay, over a channel of `workers.messaging`.

notebook ──► ServeHosts once; BindHostStore, FileCarried, StartWorker, SignalProcess, KillProcess,
             AskUse
         ◄── HostJoined, HostRefused, HostLost, StoreBound, FileNoted, Forked, Ended, UseKnown
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbaccel.workers.resource_use import ProcessUse

__all__ = [
    "AskUse",
    "BindHostStore",
    "FileCarried",
    "FileNoted",
    "HostJoined",
    "HostLost",
    "HostRefused",
    "ServeHosts",
    "StartWorker",
    "UseKnown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeHosts:
    """Be the relay of these hosts. Descriptor: the socket at which agents will connect."""

    token: str
    names: tuple[str, ...]
    device: str
    in_notebook: bool

    handler: ClassVar[str] = "nbaccel.hosts.relay:serve_hosts"
    """What a worker of the template runs whose first message this is, as module:function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined:
    """The agent of a host can fork workers."""

    name: str
    inventory: str
    """`Inventory` as JSON."""
    address: str
    """Its own, as it reaches the notebook's machine."""


@dataclass(frozen=True, slots=True)
class HostRefused:
    """A host cannot take part."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostLost:
    """The connection to a host that had joined has ended."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BindHostStore:
    """Listen for the rendezvous store on a host."""

    host: str
    port: int | None


@dataclass(frozen=True, slots=True)
class FileCarried:
    """The engine has brought a file to all hosts. Descriptor: the file. Answered by FileNoted."""

    ticket: str


@dataclass(frozen=True, slots=True)
class FileNoted:
    """The relay will not send the file's bytes."""

    ticket: str


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Fork a worker on a host. Descriptors: its channel, stdout, stderr and stack pipe."""

    ticket: int
    host: str


@dataclass(frozen=True, slots=True)
class SignalProcess:
    """Send a signal to a worker."""

    pid: int
    signal: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End a worker with all that it has started."""

    pid: int


@dataclass(frozen=True, slots=True)
class AskUse:
    """Let every host say what its workers use; each answers by UseKnown."""


@dataclass(frozen=True, slots=True)
class UseKnown:
    """What workers use, by their numbers."""

    uses: tuple[tuple[int, ProcessUse], ...]
