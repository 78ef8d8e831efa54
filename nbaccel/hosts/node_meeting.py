"""An elastic run, as one of its nodes sees it: in each round all nodes start workers."""

from __future__ import annotations

import contextlib
import json
import math
import select
import time
from typing import Any

from nbaccel.base.errors import StartupFailed
from nbaccel.base.log import write_notice
from nbaccel.base.ports import listen
from nbaccel.base.units import count_noun
from nbaccel.hosts import meeting_messages as messages
from nbaccel.hosts.helper_process import HelperProcess
from nbaccel.plan import Plan
from nbaccel.workers.worker_group import MeetingPlace

__all__ = ["NodeMeeting"]

_DEFAULT_ENDPOINT = "localhost"
_DEFAULT_BACKEND = "c10d"
_NOTICE_S = 1.0  # of waiting for other nodes, before it is told


class NodeMeeting:
    """The meeting of this node with the others of an elastic run.

    Args:
        plan: What was planned.

    Attributes:
        end_reason: Address of a node that has given up, and why; empty as long as none has.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        backend = _DEFAULT_BACKEND if config.rdzv_backend == "static" else config.rdzv_backend
        self._port = config.use_port
        self.end_reason = ""
        self._is_joined = False
        endpoint = config.rdzv_endpoint or _endpoint_of(plan)
        self._waits_for = (
            f"at {endpoint} for {count_noun(config.num_nodes, 'node')} to join "
            f"(rdzv_id={config.rdzv_id!r})"
        )
        self._helper = HelperProcess(
            messages.MeetNodes(
                backend=backend,
                endpoint=endpoint,
                run_id=config.rdzv_id,
                num_nodes=config.num_nodes,
                num_processes=plan.num_processes,
                settings=json.dumps(config.rdzv_conf),
            )
        )

    def fileno(self) -> int:
        """Readable when `wants_new_round` may have changed."""
        return self._helper.channel.fileno()

    def join(self) -> MeetingPlace:
        """Join the next round; waits for all nodes.

        Raises:
            StartupFailed: They did not come in time, or cannot be reached.
            PortTaken: This node serves the store, and the port asked for is in use.
        """
        self._is_joined = False
        self._send(messages.JoinRound())
        joined = self._receive(messages.RoundJoined, notice=self._waits_for)
        self._is_joined = True
        if joined.node_rank == 0:
            listener = listen(joined.address, self._port)
            port = listener.getsockname()[1]
            self._send(messages.Publish(joined.address, port))
            return MeetingPlace(
                address=joined.address,
                port=port,
                store_socket=listener,
                num_nodes=len(joined.workers_per_node),
                workers_per_node=joined.workers_per_node,
                rounds_before=joined.rounds_before,
            )
        known = self._receive(messages.StoreKnown)
        return MeetingPlace(
            address=known.address,
            port=known.port,
            store_socket=None,
            node_rank=joined.node_rank,
            num_nodes=len(joined.workers_per_node),
            workers_per_node=joined.workers_per_node,
            rounds_before=joined.rounds_before,
        )

    def wants_new_round(self) -> bool:
        """Whether this round is over: another node waits, has given up, or the meeting is lost."""
        while select.select([self._helper.channel], [], [], 0.0)[0]:
            try:
                message, _ = self._helper.channel.receive()
            except EOFError:  # the next `join` says so
                return True
            if self._ends_round(message):
                return True
        return False

    def _ends_round(self, message: object) -> bool:
        if isinstance(message, messages.RunEnded):
            self.end_reason = message.reason
        return isinstance(message, (messages.NodesWaiting, messages.RunEnded))

    def finish(self) -> bool:
        """Tell the other nodes that this one has finished, and wait for them.

        Returns:
            Whether all have finished; if not, they start anew, or one has given up.
        """
        self._send(messages.FinishRun())
        kinds = (messages.AllFinished, messages.NodesWaiting, messages.RunEnded)
        return not self._ends_round(self._receive(*kinds))

    def give_up(self, reason: str) -> None:
        """Let the other nodes end as well, and know why."""
        # Still waiting for the others: it would answer only when they are there.
        if not self._is_joined:
            return
        # Its process has ended: there is no way to tell them.
        with contextlib.suppress(StartupFailed):
            self._send(messages.GiveUp(reason))
            self._receive(messages.EndTold)

    def close(self) -> None:
        """Leave: the other nodes need not wait for this one."""
        self._helper.close()

    def _send(self, message: object) -> None:
        try:
            self._helper.channel.send(message)
        except OSError as error:
            raise self._gone() from error

    def _receive(self, *kinds: type, notice: str = "") -> Any:
        """Wait for an answer; as long as the process waits for the other nodes."""
        notice_at = time.monotonic() + _NOTICE_S if notice else math.inf
        while True:
            wait_s = None if notice_at == math.inf else max(0.0, notice_at - time.monotonic())
            if not select.select([self._helper.channel], [], [], wait_s)[0]:
                write_notice(f"nbaccel: waiting {notice}.\n")
                notice_at = math.inf
                continue
            try:
                message, _ = self._helper.channel.receive()
            except EOFError as error:
                raise self._gone() from error
            if isinstance(message, messages.MeetingFailed):
                raise StartupFailed(f"The nodes did not meet: {message.reason}")
            if isinstance(message, kinds):
                return message

    def _gone(self) -> StartupFailed:
        text = self._helper.error_text()
        return StartupFailed(
            "The process that meets the other nodes has ended"
            f" ({text.rpartition(chr(10))[2] or 'it was killed'}).\n{text}\n"
            "Start all nodes again."
        )


def _endpoint_of(plan: Plan) -> str:
    if plan.config.num_nodes == 1:
        return _DEFAULT_ENDPOINT
    return f"{plan.master_addr}:{plan.port}" if plan.port else plan.master_addr
