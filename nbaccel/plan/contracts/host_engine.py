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
        """Hosts that the engine itself knows to be lost, each with what is known of it.

        Never waits. By default none: Ray's own errors tell.
        """
        return {}

    @abstractmethod
    def end(self) -> None:
        """End what was started for the actors, which were ended before, and wait for that."""


class Engine(ABC):
    """Finds hosts for a run, and has an actor of Ray's on each."""

    name: str

    @abstractmethod
    def unavailable_reason(self, config: RunConfig) -> str:
        """Why its hosts cannot be used here and now, with what to do; empty where they can.

        Asked while planning: it starts nothing and takes milliseconds.
        """

    def unready_reason(self) -> str:
        """Why a notebook cannot use its hosts though they are there; empty where it can.

        Scripts, which another launcher starts there, need none of this. By default it can.
        """
        return ""

    def connect(self) -> None:  # noqa: B027  # few have something to do
        """Connect a process that a command has started to what the engine runs on.

        A notebook does that itself. Raises `ConfigError` where nothing answers there.
        """

    @abstractmethod
    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """The hosts that a launch takes, in the order of ranks.

        `config.num_processes` counts the workers on all hosts together; hosts that would have none
        are left out. Raises `ConfigError` where there are none, or they have too few slots; every
        mistake at once.
        """

    @abstractmethod
    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        """Start an actor on each host; returns once Ray has been asked for them.

        Raises `StartupFailed`, which says which host did not come up.
        """

    def replacements(self, config: RunConfig, lost: Sequence[str]) -> Sequence[Host]:
        """The hosts for the next attempt after some, by name, were lost: those that are left."""
        return [host for host in self.hosts(config) if host.name not in lost]
