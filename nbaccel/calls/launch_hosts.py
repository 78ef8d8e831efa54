"""Where the workers of a launch run: here, or on hosts that stay for all its attempts."""

from __future__ import annotations

import socket

from nbaccel.base.log import write_notice
from nbaccel.base.ports import listen
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import engine_row
from nbaccel.hosts.host_session import HostSession
from nbaccel.plan import Plan
from nbaccel.workers.assignments import MeetingPlace
from nbaccel.workers.start_method import Starter

__all__ = ["LaunchHosts"]


class LaunchHosts:
    """The machines of one launch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._row = engine_row(plan.engine)
        self._session: HostSession | None = None
        self._lost: list[str] = []
        self._store_listener: socket.socket | None = None

    @property
    def config(self) -> RunConfig:
        """What the user said."""
        return self._plan.config

    def prepare(self) -> Plan:
        """Have hosts ready for the next attempt: those of the last one, unless some were lost."""
        if not self._row.runs_on_hosts:
            return self._plan
        if self._session is not None and self._session.lost_hosts:
            self._lost += self._session.lost_hosts
            self.close()
        if self._session is None:
            self._session = HostSession.open(self._plan, self._lost)
            for warning in self._session.plan.warnings:
                write_notice(f"nbaccel: {warning}\n")
        return self._session.plan

    def what_is_left(self) -> str:
        """What a message about a new attempt adds: hosts that were lost."""
        hosts = self._session.lost_hosts if self._session is not None else ()
        return f", without {', '.join(hosts)}" if hosts else ""

    def meeting_place(self) -> MeetingPlace:
        """Where the workers of the next attempt meet."""
        plan = self._plan
        config = self._plan.config
        if self._session is not None:
            return self._session.bind_store(plan.port)
        if config.node_rank == 0:
            self._store_listener = listen(plan.master_addr, plan.port)
        return MeetingPlace(
            address=plan.master_addr,
            port=self._store_listener.getsockname()[1] if self._store_listener else plan.port or 0,
            store_socket=self._store_listener,
            node_rank=config.node_rank,
            num_nodes=config.num_nodes,
        )

    def close_store(self) -> None:
        """Close this process's copy of the store's socket."""
        if self._store_listener is not None:
            self._store_listener.close()
            self._store_listener = None

    def starter(self) -> Starter | None:
        """What starts workers on the hosts; None for this machine."""
        return None if self._session is None else self._session.starter()

    def close(self) -> None:
        """Let all hosts go."""
        self.close_store()
        if self._session is not None:
            self._session.close()
            self._session = None
