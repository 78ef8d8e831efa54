"""What starts this notebook's workers on other machines: the contract of an engine.

    notebook process                                    each host
    ----------------                                    ---------
    Engine.hosts(config)         which hosts there are
    Engine.start_agents(...)  ── ssh, srun, Ray, … ──►  `python -m nbaccel.hosts.agent`
    AgentCrew                    tells of agents that   reads an AgentHello from its standard input,
                                 have ended, ends all   connects to the notebook's machine

An engine finds hosts, starts one agent process on each, ends it, and tells if one has ended. All
else (workers, messages, output, errors, weights) is the agent's, which is the same for all engines.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from nbaccel.config import RunConfig

__all__ = ["HANDED_FILES_VARIABLE", "AgentCrew", "AgentHello", "Engine", "Host"]

HANDED_FILES_VARIABLE = "NBACCEL_HANDED_FILES"
"""Environment variable of an agent: the descriptor of a Unix socket of type SEQPACKET.

A packet is a ticket in UTF-8, with the descriptor of the memory file that the agent is handed.
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that takes part.

    Attributes:
        name: By which messages, and its agent, call it; no two hosts have the same.
        address: Host name or address at which other machines reach it; the notebook's machine
            takes the interface that leads there.
        slots: How many workers it takes at most; None: as many as it has devices.
        is_here: Whether it is the notebook's own machine.
        devices: Numbers of the devices that its workers see; empty: all.
    """

    name: str
    address: str
    slots: int | None = None
    is_here: bool = False
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AgentHello:
    """What an agent is told by its standard input, in one line; never by its command line.

    Attributes:
        addresses: Where the notebook's machine listens; the first that answers is taken.
        port: TCP port there.
        token: The secret, as hexadecimal digits, by which both sides know each other.
        host: The name of the agent's host; empty where the agent finds it in `host_variable`.
        host_variable: Environment variable of the host with its name, where one line of text goes
            to all of them.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    host: str = ""
    host_variable: str = ""

    def to_line(self) -> str:
        """One line of text, which ends with a line feed."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> AgentHello:
        """Read what :meth:`to_line` wrote.

        Args:
            line: The line.
        """
        facts = json.loads(line)
        return cls(**{**facts, "addresses": tuple(facts["addresses"])})


class AgentCrew(ABC):
    """The agents that an engine has started for one notebook."""

    @abstractmethod
    def problems(self) -> Mapping[str, str]:
        """Hosts whose agent has ended, or could not be started, each with what is known of it.

        Never waits. While hosts start it is asked every tenth of a second; later, once a
        connection is lost.
        """

    def carry(self, file_descriptor: int) -> str:
        """Bring a large memory file to all hosts by a way of the engine's own, if it has one.

        Args:
            file_descriptor: The file; it stays the caller's.

        Returns:
            A ticket, when each agent has been handed a copy with that name by the socket in
            `HANDED_FILES_VARIABLE`. Empty, as here: the notebook's connections carry it.
        """
        return ""

    @abstractmethod
    def end(self, grace_s: float) -> None:
        """End all agents that are left, and wait until nothing of them is.

        Args:
            grace_s: How long they get to leave by themselves (the notebook has hung up) before
                they are killed, in seconds.
        """


class Engine(ABC):
    """Finds hosts for a run, and starts an agent on each."""

    name: str

    @abstractmethod
    def unavailable_reason(self, config: RunConfig) -> str:
        """Why it cannot be used here and now, with what to do; empty where it can.

        Asked while planning: it starts nothing and takes milliseconds.

        Args:
            config: What the user said.
        """

    def connect(self) -> None:  # noqa: B027  # few have something to do
        """Connect a process that a command has started to what the engine runs on.

        A notebook does that itself, with options of its own. By default there is nothing to do.

        Raises:
            ConfigError: Nothing answers there.
        """

    @abstractmethod
    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """The hosts that a launch takes, in the order of ranks.

        Args:
            config: What the user said. `num_processes` counts the workers on all hosts together;
                hosts that would have none are left out.

        Raises:
            ConfigError: There are none, or they have too few slots; every mistake at once.
        """

    @abstractmethod
    def start_agents(self, hosts: Sequence[Host], hello: AgentHello) -> AgentCrew:
        """Start an agent on each host; returns before they have connected.

        Args:
            hosts: The hosts.
            hello: What they are told, but for the name of each host.
        """

    def replacements(self, config: RunConfig, lost: Sequence[str]) -> Sequence[Host]:
        """The hosts for the next attempt after some were lost.

        Args:
            config: What the user said.
            lost: Names of the hosts that were lost.

        Returns:
            By default those that are left.
        """
        return [host for host in self.hosts(config) if host.name not in lost]
