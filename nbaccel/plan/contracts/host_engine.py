"""What starts this notebook's workers on other machines: the contract of an engine.

notebook process                                       each host
----------------                                       ---------
Engine.hosts(config)        which hosts there are
Engine.start_nodes(hosts)  ── the user's Ray, or ──►   an actor of Ray's: `hosts.node_actor`
one by ssh or srun
NodeCrew                    the actors, ends all
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.config import RunConfig

__all__ = ["Engine", "Host", "NodeCrew"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that takes part."""

    name: str  # by which messages call it; no two hosts have the same
    # Host name or address at which other machines reach it.
    address: str
    slots: int | None = None  # how many workers it takes at most; None: as many as it has devices
    is_here: bool = False  # whether it is the notebook's own machine
    devices: tuple[int, ...] = ()  # numbers of the devices that its workers see; empty: all


class NodeCrew(ABC):
    """The actors that an engine has started for one notebook."""

    actors: Mapping[str, Any]  # name of a host → Ray's handle of the actor there

    def problems(self) -> Mapping[str, str]:
        """Hosts that the engine knows to be lost, with what is known of each; never waits."""
        return {}

    @abstractmethod
    def end(self) -> None:
        """End what was started for the actors, which were ended before, and wait for that."""


class Engine(ABC):
    """Finds hosts for a run, and has an actor of Ray's on each."""

    name: str

    @abstractmethod
    def unavailable_reason(self, config: RunConfig) -> str:
        """Why its hosts cannot be used here and now, with what to do; starts nothing."""

    def unready_reason(self) -> str:
        """Why a notebook, unlike a script, cannot use its hosts though they are there."""
        return ""

    def connect(self) -> None:  # noqa: B027  # few have something to do
        """Connect a process that a command has started; `ConfigError` where nothing answers."""

    @abstractmethod
    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """The hosts that a launch takes, in the order of ranks, but those without a worker.

        `config.num_processes` counts all workers. Raises `ConfigError` where there are no hosts, or
        they have too few slots; every mistake at once.
        """

    @abstractmethod
    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        """Ask Ray for an actor on each host; `StartupFailed` says which host did not come up."""

    def replacements(self, config: RunConfig, lost: Sequence[str]) -> Sequence[Host]:
        """The hosts for the next attempt after some, by name, were lost: those that are left."""
        return [host for host in self.hosts(config) if host.name not in lost]
