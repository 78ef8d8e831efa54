"""An elastic run, as one of its nodes sees it: in each round all nodes start workers."""

from __future__ import annotations

import json
import select
from typing import Any

from nbaccel.errors import StartupFailed
from nbaccel.hosts import meeting_messages as messages
from nbaccel.hosts.helper_process import HelperProcess
from nbaccel.plan import Plan
from nbaccel.ports import listen
from nbaccel.workers.worker_group import MeetingPlace

__all__ = ["NodeMeeting"]

_DEFAULT_ENDPOINT = "localhost"
_DEFAULT_BACKEND = "c10d"


class NodeMeeting:
    """The meeting of this node with the others of an elastic run.

    Args:
        plan: What was planned.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        backend = _DEFAULT_BACKEND if config.rdzv_backend == "static" else config.rdzv_backend
        self._port = config.use_port
        self._helper = HelperProcess(
            messages.MeetNodes(
                backend=backend,
                endpoint=config.rdzv_endpoint or _endpoint_of(plan),
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
        self._send(messages.JoinRound())
        joined = self._receive(messages.RoundJoined)
        if joined.node_rank == 0:
            listener = listen(joined.address, self._port)
            port = listener.getsockname()[1]
            self._send(messages.Publish(joined.address, port))
            return MeetingPlace(
                address=joined.address,
                port=port,
                store_socket=listener,
                num_nodes=joined.num_nodes,
            )
        known = self._receive(messages.StoreKnown)
        return MeetingPlace(
            address=known.address,
            port=known.port,
            store_socket=None,
            node_rank=joined.node_rank,
            num_nodes=joined.num_nodes,
        )

    def wants_new_round(self) -> bool:
        """Whether another node waits to join, or this one has lost the meeting."""
        while select.select([self._helper.channel], [], [], 0.0)[0]:
            try:
                message, _ = self._helper.channel.receive()
            except EOFError:  # the next `join` says so
                return True
            if isinstance(message, messages.NodesWaiting):
                return True
        return False

    def finish(self) -> None:
        """Tell the other nodes that this one has finished, and wait for them."""
        self._send(messages.FinishRun())
        self._receive(messages.AllFinished)

    def close(self) -> None:
        """Leave: the other nodes need not wait for this one."""
        self._helper.close()

    def _send(self, message: object) -> None:
        try:
            self._helper.channel.send(message)
        except OSError as error:
            raise self._gone() from error

    def _receive(self, kind: type) -> Any:
        """Wait for an answer; as long as the process waits for the other nodes."""
        while True:
            try:
                message, _ = self._helper.channel.receive()
            except EOFError as error:
                raise self._gone() from error
            if isinstance(message, messages.MeetingFailed):
                raise StartupFailed(f"The nodes did not meet: {message.reason}")
            if isinstance(message, kind):
                return message

    def _gone(self) -> StartupFailed:
        error_text = self._helper.error_text()
        return StartupFailed(
            "The process that meets the other nodes has ended"
            f" ({error_text.rpartition(chr(10))[2] or 'it was killed'}).\n{error_text}\n"
            "Start all nodes again."
        )


def _endpoint_of(plan: Plan) -> str:
    if plan.config.num_nodes == 1:
        return _DEFAULT_ENDPOINT
    return f"{plan.master_addr}:{plan.port}" if plan.port else plan.master_addr
