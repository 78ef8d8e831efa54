"""Where the workers of a launch run: here, or on hosts that stay for all its attempts."""

from __future__ import annotations

import socket

from nbaccel.base.errors import WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.base.ports import listen
from nbaccel.calls.supervisor import CallResult
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import engine_row
from nbaccel.hosts.host_session import HostSession
from nbaccel.hosts.node_meeting import NodeMeeting
from nbaccel.plan import Plan
from nbaccel.workers.start_method import Starter
from nbaccel.workers.worker_group import MeetingPlace

__all__ = ["LaunchHosts", "NodesWait"]


class NodesWait(Exception):
    """Another node waits to join: all nodes start their workers anew."""


class LaunchHosts:
    """The machines of one launch.

    Args:
        plan: What was planned with what this machine has.

    Attributes:
        meeting: The meeting with nodes that have notebooks or commands of their own; None where
            the nodes are known beforehand.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._row = engine_row(plan.engine)
        self._session: HostSession | None = None
        self._lost: list[str] = []
        self._store_listener: socket.socket | None = None
        self.meeting: NodeMeeting | None = None

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
        if not self._row.starts_agents:
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
        """Where the workers of the next attempt meet.

        Raises:
            PortTaken: The port asked for is in use.
            StartupFailed: The other nodes did not come.
        """
        plan = self._plan
        config = self._plan.config
        if self._session is not None:
            return self._session.bind_store(plan.port)
        if self._row.meets and config.num_nodes > 1:
            if self.meeting is None:
                self.meeting = NodeMeeting(plan)
            meeting_place = self.meeting.join()
            self._store_listener = meeting_place.store_socket
            return meeting_place
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

    def wait_for_nodes(self, call_result: CallResult, *, is_over: bool) -> None:
        """Before anything of a call is taken over: hear what the other nodes do.

        Args:
            call_result: How the workers of this node ended.
            is_over: Whether they were stopped because of another node.

        Raises:
            NodesWait: All nodes start their workers anew.
            WorkerFailed: Another node has given up.
        """
        if self.meeting is None or call_result.interrupted:
            return
        if not is_over and (not call_result.went_well or self.meeting.finish()):
            return
        if not self.meeting.end_reason:
            raise NodesWait
        raise WorkerFailed(
            f"Another node has ended the run: {self.meeting.end_reason}.\nThis node's workers "
            "were stopped, and its model is as it was. Look at that node's own report."
        )

    def is_ended(self) -> bool:
        """Whether another node has given up, so that no restart can succeed."""
        if self.meeting is not None:
            self.meeting.wants_new_round()
        return self.meeting is not None and bool(self.meeting.end_reason)

    def give_up(self, error: BaseException) -> None:
        """This launch ends with an error: the other nodes are to end, too."""
        if self.meeting is not None and not self.meeting.end_reason:
            is_stop = isinstance(error, KeyboardInterrupt)
            headline = str(error).partition("\n")[0].rstrip(":")
            self.meeting.give_up("it was stopped by its user" if is_stop else headline)

    def close(self) -> None:
        """Let all hosts go."""
        self.close_store()
        if self._session is not None:
            self._session.close()
            self._session = None
        if self.meeting is not None:
            self.meeting.close()
            self.meeting = None
