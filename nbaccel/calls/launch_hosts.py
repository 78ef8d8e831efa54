"""Where the workers of a launch run: here, or on hosts that stay for all its attempts."""

from __future__ import annotations

from nbaccel.base.log import write_notice
from nbaccel.config.capabilities import engine_row
from nbaccel.hosts.host_session import HostSession
from nbaccel.plan import Plan

__all__ = ["LaunchHosts"]


class LaunchHosts:
    """The machines of one launch or pool.

    Attributes:
        plan: What was planned, before the hosts were known.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._session: HostSession | None = None
        self._lost: list[str] = []

    def session(self) -> HostSession | None:
        """Hosts for the next attempt: those of the last one, unless some were lost; None: here."""
        if not engine_row(self.plan.engine).runs_on_hosts:
            return None
        if self._session is not None and self._session.lost_hosts:
            self._lost += self._session.lost_hosts
            self.close()
        if self._session is None:
            self._session = HostSession.open(self.plan, self._lost)
            for warning in self._session.plan.warnings:
                write_notice(f"nbaccel: {warning}\n")
        return self._session

    def what_is_left(self) -> str:
        """What a message about a new attempt adds: hosts that were lost."""
        hosts = self._session.lost_hosts if self._session is not None else ()
        return f", without {', '.join(hosts)}" if hosts else ""

    def close(self) -> None:
        """Let all hosts go."""
        if self._session is not None:
            self._session.close()
            self._session = None
