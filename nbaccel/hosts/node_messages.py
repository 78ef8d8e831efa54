"""What travels between the notebook and a node's actor, as arguments and results of its methods.

    notebook ──► NewFile, FileBytes, Packet, ChannelClosed, Forget     `NodeActor.take`
             ◄── Output, NewFile, FileBytes, Packet, WorkerEnded,      `NodeActor.events`
                 NodeFailed

A *worker* is named by a number that the notebook gives it; so is a channel, and a worker's first
channel has the worker's number. Files have even numbers if they are copies of the notebook's, and
odd ones if they come from a node. Nothing here needs torch, which a node's actor does not import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbaccel.workers.messaging import Ended

STAGING = "staging"
"""The kind of a file that workers fill; others are filled by whoever sends them."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A memory file whose bytes follow; those that do not are zero."""

    number: int
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Pieces of a file."""

    number: int
    pieces: Any
    """(first byte, bytes as an array of uint8) of each, or Ray's reference to a list of such."""


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
    """In the place of a descriptor: the socket on which the node listens for the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A packet of a worker's channel, as `workers.messaging` packs it."""

    channel: int
    content: bytes
    attached: tuple[FileCopy | SecondChannel | StoreListener, ...] = ()
    """What stands for its descriptors."""
    topology: str = ""
    """The worker's place, if the message assigns it one."""


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The notebook has closed its end."""

    channel: int


@dataclass(frozen=True, slots=True)
class Output:
    """What a worker has written to one of its pipes."""

    worker: int
    stream: str
    content: bytes


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker is gone, and all that it has printed and said was sent before."""

    worker: int
    ended: Ended


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """The actor cannot go on."""

    reason: str
