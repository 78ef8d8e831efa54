"""Where the workers of a launch run: on this machine, or on hosts that stay for all its attempts."""

from __future__ import annotations

import socket
import sys

from nbaccel.capabilities import engine_row
from nbaccel.config import RunConfig
from nbaccel.hosts.host_session import HostSession
from nbaccel.plan import Plan
from nbaccel.ports import listen
from nbaccel.workers.start_method import Starter
from nbaccel.workers.worker_group import StoreSocket

__all__ = ["LaunchHosts"]


class LaunchHosts:
    """The machines of one launch.

    Args:
        plan: What was planned with what this machine has.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_remote = engine_row(plan.engine).starts_agents
        self._session: HostSession | None = None
        self._lost: list[str] = []

    @property
    def config(self) -> RunConfig:
        """What the user said."""
        return self._plan.config

    def prepare(self) -> Plan:
        """Have hosts ready for the next attempt: those of the last one, unless some were lost.

        Returns:
            The plan with what they have.

        Raises:
            StartupFailed: Some did not join.
        """
        if not self._is_remote:
            return self._plan
        if self._session is not None and self._session.lost_hosts:
            self._lost += self._session.lost_hosts
            self.close()
        if self._session is None:
            self._session = HostSession.open(self._plan, self._lost)
            for warning in self._session.plan.warnings:
                sys.stderr.write(f"nbaccel: {warning}\n")
        return self._session.plan

    def what_is_left(self) -> str:
        """What a message about a new attempt adds: hosts that were lost."""
        lost_hosts = self._session.lost_hosts if self._session is not None else ()
        return f", without {', '.join(lost_hosts)}" if lost_hosts else ""

    def bind_store(self) -> tuple[StoreSocket | None, socket.socket | None]:
        """Where the rendezvous store is served, and the socket to close once rank 0 has it."""
        plan = self._plan
        if self._session is not None:
            return self._session.bind_store(plan.port), None
        if plan.config.node_rank != 0:
            return None, None
        store_listener = listen(plan.master_addr, plan.port)
        return StoreSocket.of_listener(plan.master_addr, store_listener), store_listener

    def starter(self) -> Starter | None:
        """What starts workers on the hosts; None for this machine."""
        return None if self._session is None else self._session.starter()

    def close(self) -> None:
        """Let all hosts go."""
        if self._session is not None:
            self._session.close()
            self._session = None
