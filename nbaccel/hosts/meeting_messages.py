"""Messages between the notebook and the process that meets other nodes for it.

notebook ──► MeetNodes once; then per round JoinRound, Publish (where this node is the first)
         ◄── RoundJoined, StoreKnown, MeetingFailed; at any time NodesWaiting, RunEnded
notebook ──► FinishRun ◄── AllFinished, NodesWaiting or RunEnded
notebook ──► GiveUp    ◄── EndTold
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "AllFinished",
    "EndTold",
    "FinishRun",
    "GiveUp",
    "JoinRound",
    "MeetNodes",
    "MeetingFailed",
    "NodesWaiting",
    "Publish",
    "RoundJoined",
    "RunEnded",
    "StoreKnown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetNodes:
    """Meet the other nodes of a run by torch's rendezvous."""

    backend: str
    endpoint: str
    run_id: str
    num_nodes: int
    """At most; `min_nodes` in the settings is the least number."""
    num_processes: int
    settings: str
    """`RunConfig.rdzv_conf` as JSON."""

    handler: ClassVar[str] = "nbaccel.hosts.meeting_process:meet_nodes"
    """What a worker of the template runs whose first message this is, as module:function."""


@dataclass(frozen=True, slots=True)
class JoinRound:
    """Join the next round; answered by RoundJoined once all nodes have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundJoined:
    """All nodes of a round are there."""

    node_rank: int
    workers_per_node: tuple[int, ...]
    """How many workers each node starts, by the number of the node."""
    address: str
    """This node's, on the way to the rendezvous."""
    rounds_before: int
    """How many rounds there were before this one: the same on all nodes."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the other nodes where the workers' store is."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class StoreKnown:
    """Where the first node serves the workers' store."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """A node waits to join: the workers of all nodes have to be started anew."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Another node has given up, and so must this one."""

    reason: str
    """Its address, and why."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Let all other nodes end as well, and know why."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndTold:
    """The other nodes know, or are gone."""


@dataclass(frozen=True, slots=True)
class MeetingFailed:
    """The nodes did not meet."""

    reason: str


@dataclass(frozen=True, slots=True)
class FinishRun:
    """This node's workers have returned."""


@dataclass(frozen=True, slots=True)
class AllFinished:
    """All nodes' have, or the others took too long."""
