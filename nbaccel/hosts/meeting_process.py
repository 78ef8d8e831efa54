"""The process that meets the other nodes of an elastic run, by torch's rendezvous.

    notebook ── channel ──► this process ══ torch's rendezvous ══ those of the other nodes

A rendezvous waits for minutes, keeps threads and may serve a store: in a process of its own Stop
ends it at once, and the notebook stays without threads. It is forked from the template.

Torch numbers the nodes and notices those that come and go; where a round's workers meet is told
beside it, in the round's own store. Torch's own way to tell it does not survive the loss of a node:
the first node keeps the address of the first round and publishes it in no later one (torch 2.13,
DynamicRendezvousHandler.next_rendezvous), unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from nbaccel.base import env
from nbaccel.hosts import meeting_messages as messages
from nbaccel.hosts.connecting import address_towards
from nbaccel.hosts.versions import own_versions
from nbaccel.workers import messaging

__all__ = ["meet_nodes"]

_RENDEZVOUS_PORT = 29400
_ROUND_S = 600
_NODES_LOOK_S = 0.5
_RETRY_S = 0.25
_FINISH_S = 300.0
"""For the other nodes to finish after this one; torch's agents wait as long."""
_TELL_S = 3.0
"""At most, for the other nodes to learn that the run has ended."""
# A lost node is noticed after three missed signs of life; torch's own default is 15 seconds.
_SIGNS_OF_LIFE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3}


def meet_nodes(
    notebook_channel: messaging.Channel,
    meet_message: messages.MeetNodes,
    file_descriptors: list[int],
    inherited: object,
) -> None:
    """Meet the other nodes, round after round, until the notebook hangs up.

    Args:
        notebook_channel: To the notebook.
        meet_message: The first message.
        file_descriptors: None come with it.
        inherited: What came with a fork from the notebook: nothing.
    """
    # See the head of this file.
    env.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        meeting = _Meeting(notebook_channel, meet_message)
    except _NoMeeting as error:
        notebook_channel.send(messages.MeetingFailed(str(error)))
        notebook_channel.receive()
        return
    try:
        meeting.loop()
    finally:
        meeting.close()


class _NoMeeting(Exception):
    """The nodes cannot meet; the text says why."""


class _Meeting:
    def __init__(
        self, notebook_channel: messaging.Channel, meet_message: messages.MeetNodes
    ) -> None:
        self._channel = notebook_channel
        self._settings = meet_message
        given: dict[str, Any] = json.loads(meet_message.settings) or {}
        self._join_s = float(given.get("join_timeout", given.get("timeout", _ROUND_S)))
        self._least_nodes = int(given.pop("min_nodes", meet_message.num_nodes))
        self._conf = _SIGNS_OF_LIFE | given | {"join_timeout": int(self._join_s)}
        self._host, self._port = parse_rendezvous_endpoint(
            meet_message.endpoint, default_port=_RENDEZVOUS_PORT
        )
        self._address = self._own_address()
        self._handler: Any = None
        self._board: Any = None
        """Keys of the whole run, where the backend is c10d; those of a round are in its store."""
        self._own_number = 0
        self._known_end = ""
        self._round: Any = None
        self._is_in_round = False

    def loop(self) -> None:
        """Do what the notebook asks for; tell it of nodes that wait to join."""
        while True:
            readable, _, _ = select.select([self._channel], [], [], _NODES_LOOK_S)
            if not readable:
                self._poll_nodes()
                continue
            message, _ = self._channel.receive()
            try:
                _ANSWERS[type(message)](self, message)
            except _NoMeeting as error:
                self._channel.send(messages.MeetingFailed(str(error)))

    def close(self) -> None:
        """Close the rendezvous: the other nodes need not wait for this one."""
        if self._handler is not None:
            # The node that served it may have gone before.
            with contextlib.suppress(Exception):
                self._handler.shutdown()

    # ---- joining

    def _join(self, message: messages.JoinRound) -> None:
        self._is_in_round = False
        deadline = time.monotonic() + self._join_s
        if self._handler is None:
            self._handler = self._make_handler(deadline)
        try:
            self._count(1)
            with self._watching_for_the_end():
                self._round = self._handler.next_rendezvous()
            rounds_before = self._count_rounds()
            workers_per_node = self._compare_nodes()
        except RendezvousTimeoutError as error:
            raise _NoMeeting(self._who_is_missing()) from error
        except (RendezvousClosedError, RendezvousConnectionError) as error:
            if self._known_end:
                raise _NoMeeting(f"another node has ended the run ({self._known_end})") from error
            if isinstance(error, RendezvousConnectionError):
                raise self._lost() from error
            raise _NoMeeting(
                f"run {self._settings.run_id!r} at {self._endpoint} has been closed: "
                f"{self._end_reason() or 'another node has finished it, or given up'}. Start all "
                "nodes again, with another rdzv_id."
            ) from error
        except RuntimeError as error:
            raise self._lost() from error
        self._count(-1)
        self._is_in_round = True
        self._channel.send(
            messages.RoundJoined(
                node_rank=self._round.rank,
                workers_per_node=workers_per_node,
                address=self._address,
                rounds_before=rounds_before,
            )
        )
        if self._round.rank != 0:
            self._tell_store(deadline)

    def _make_handler(self, deadline: float) -> Any:
        # Not left to torch, which looks up this machine's own name, as containers often cannot.
        serves = self._is_here() if self._settings.backend == "c10d" else None
        while True:
            if not serves:
                self._await_server(deadline)
            try:
                handler = get_rendezvous_handler(self._parameters(serves))
            except (RendezvousConnectionError, ValueError) as error:
                if isinstance(error, ValueError) or time.monotonic() >= deadline:
                    raise _NoMeeting(
                        f"the rendezvous {self._settings.backend!r} at {self._endpoint} cannot be "
                        f"used: {error}. Look at rdzv_backend and rdzv_conf."
                    ) from error
                # Another node on this machine serves it already.
                serves = False if serves else serves
            else:
                self._open_board()
                return handler

    def _parameters(self, serves: bool | None) -> RendezvousParameters:
        place = {} if serves is None else {"is_host": serves}
        return RendezvousParameters(
            backend=self._settings.backend,
            endpoint=self._settings.endpoint,
            run_id=self._settings.run_id,
            min_nodes=self._least_nodes,
            max_nodes=self._settings.num_nodes,
            local_addr=self._address,
            **{**place, **self._conf},
        )

    def _await_server(self, deadline: float) -> None:
        """Wait for the node that serves the rendezvous, unless it is this one, or unreachable."""
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=_RETRY_S * 20).close()
                return
            # It has not been started yet.
            except (ConnectionRefusedError, TimeoutError):
                if time.monotonic() >= deadline:
                    raise _NoMeeting(
                        f"nothing answers at rdzv_endpoint={self._endpoint!r} after "
                        f"{self._join_s:.0f} s. Start the node with that address too, or correct "
                        "the address."
                    ) from None
            except OSError as error:
                raise self._unreachable(error) from error
            self._wait()

    def _wait(self) -> None:
        """Wait a little; the notebook may hang up meanwhile."""
        if select.select([self._channel], [], [], _RETRY_S)[0]:
            raise EOFError("the notebook gave up")

    def _is_here(self) -> bool:
        return self._address == socket.gethostbyname(self._host)

    @property
    def _endpoint(self) -> str:
        return f"{self._host}:{self._port}"

    def _own_address(self) -> str:
        try:
            return address_towards(self._host)
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> _NoMeeting:
        return _NoMeeting(
            f"rdzv_endpoint={self._settings.endpoint!r} cannot be reached: "
            f"{error.strerror or error}. The nodes would never meet. Give the address of one of "
            "them as all others reach it."
        )

    # ---- who is there

    def _open_board(self) -> None:
        if self._settings.backend != "c10d":
            return
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host,
            self._port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
        self._board = dist.PrefixStore(  # type: ignore[attr-defined]
            f"nbaccel/{self._settings.run_id}", store
        )
        self._own_number = int(self._board.add("arrivals", 1)) - 1
        self._board.set(f"arrival/{self._own_number}", self._address)

    def _count(self, change: int) -> None:
        if self._board is not None:
            self._board.add("waiting", change)

    def _count_rounds(self) -> int:
        """How many rounds there were before, as the first node knows it."""
        store = self._round.store
        if self._round.rank == 0:
            number = 0 if self._board is None else int(self._board.add("rounds", 1)) - 1
            store.set("nbaccel/rounds", str(number))
        return int(store.get("nbaccel/rounds"))

    def _who_is_missing(self) -> str:
        known = ""
        if self._board is not None:
            num_waiting = int(self._board.add("waiting", 0))
            arrivals = range(int(self._board.add("arrivals", 0)))
            addresses = [self._board.get(f"arrival/{number}").decode() for number in arrivals]
            known = (
                f": {num_waiting} of {self._least_nodes} were there "
                f"(of those that ever came: {', '.join(addresses)})"
            )
        return (
            f"the nodes of run {self._settings.run_id!r} did not meet at {self._endpoint} within "
            f"{self._join_s:.0f} s{known}. Start all {self._least_nodes} with the same "
            "rdzv_endpoint and rdzv_id, or give them more time: "
            'rdzv_conf={"join_timeout": 1800}.'
        )

    def _compare_nodes(self) -> tuple[int, ...]:
        """How many workers each node starts; nodes whose code would not fit are refused."""
        facts = (self._address, json.dumps(own_versions()), self._settings.num_processes)
        store = self._round.store
        store.set(f"nbaccel/node/{self._round.rank}", json.dumps(facts))
        nodes = [
            json.loads(store.get(f"nbaccel/node/{rank}")) for rank in range(self._round.world_size)
        ]
        if len({versions for _, versions, _ in nodes}) > 1:
            told = ", ".join(f"{address}: {versions}" for address, versions, _ in nodes)
            raise _NoMeeting(
                f"the nodes differ in versions ({told}). Their code would not fit together. Make "
                "them equal."
            )
        return tuple(num_workers for _, _, num_workers in nodes)

    # ---- the end of the run

    def _end_reason(self) -> str:
        """Why another node has ended the run; nothing while it goes on."""
        # The node that serves the rendezvous is gone: the workers find out by themselves.
        with contextlib.suppress(RuntimeError):
            if not self._known_end and self._board is not None and self._board.check(["end"]):
                number, address, reason = json.loads(self._board.get("end"))
                if number != self._own_number:
                    # Kept, because the node that serves these keys goes when all have been told.
                    self._known_end = f"{address}: {reason}"
                    self._board.add("told", 1)
        return self._known_end

    @contextlib.contextmanager
    def _watching_for_the_end(self) -> Iterator[None]:
        """Look for the end of the run while torch waits for nodes, and does not return."""
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(_RETRY_S):
                self._end_reason()

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def _lost(self) -> _NoMeeting:
        return _NoMeeting(
            f"the connection to the rendezvous at {self._endpoint} was lost. The node that serves "
            "it has ended. Start all nodes again."
        )

    def _give_up(self, message: messages.GiveUp) -> None:
        # The node that serves the rendezvous is gone: nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            if self._board is not None and self._round is not None and not self._end_reason():
                end = [self._own_number, self._address, message.reason]
                self._board.set("end", json.dumps(end))
                # This node may be the one that serves the keys: they go when it goes.
                deadline = time.monotonic() + _TELL_S
                num_others = self._round.world_size - 1
                while self._board.add("told", 0) < num_others and time.monotonic() < deadline:
                    self._wait()
        self._channel.send(messages.EndTold())

    # ---- the workers' store

    def _publish(self, message: messages.Publish) -> None:
        self._round.store.set("nbaccel/store", json.dumps([message.address, message.port]))

    def _tell_store(self, deadline: float) -> None:
        self._round.store.wait(
            ["nbaccel/store"], timedelta(seconds=max(1.0, deadline - time.monotonic()))
        )
        address, port = json.loads(self._round.store.get("nbaccel/store"))
        self._channel.send(messages.StoreKnown(address, port))

    # ---- while workers run, and at the end

    def _poll_nodes(self) -> None:
        if self._is_in_round and (change := self._change()) is not None:
            self._is_in_round = False
            self._channel.send(change)

    def _change(self) -> messages.RunEnded | messages.NodesWaiting | None:
        """What the other nodes have done that ends this round."""
        if end_reason := self._end_reason():
            return messages.RunEnded(end_reason)
        # The node that serves it is gone: the workers will say what happened.
        with contextlib.suppress(RendezvousConnectionError, RuntimeError):
            if self._handler.num_nodes_waiting():
                return messages.NodesWaiting()
        return None

    def _finish(self, message: messages.FinishRun) -> None:
        """Wait for the other nodes: one of them may need what this node serves."""
        self._is_in_round = False
        store = self._round.store
        deadline = time.monotonic() + _FINISH_S
        # The node that served it has finished, and waited for all others.
        with contextlib.suppress(RuntimeError):
            num_finished = store.add("nbaccel/finished", 1)
            while num_finished < self._round.world_size and time.monotonic() < deadline:
                if (change := self._change()) is not None:
                    self._channel.send(change)
                    return
                self._wait()
                num_finished = store.add("nbaccel/finished", 0)
            # Seen by all before the one that serves the store takes it away.
            num_seen = store.add("nbaccel/seen", 1)
            while (
                self._is_here()
                and num_seen < self._round.world_size
                and time.monotonic() < deadline
            ):
                self._wait()
                num_seen = store.add("nbaccel/seen", 0)
        self._channel.send(messages.AllFinished())


_ANSWERS: dict[type, Callable[[_Meeting, Any], None]] = {
    messages.JoinRound: _Meeting._join,
    messages.Publish: _Meeting._publish,
    messages.FinishRun: _Meeting._finish,
    messages.GiveUp: _Meeting._give_up,
}
