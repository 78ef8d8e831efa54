"""Where the default process group of a worker meets, and how process groups end there.

Code written for `mp.spawn` chooses an address of its own (`MASTER_PORT = "12355"`), where rank 0
would serve a store. In a worker all ranks are clients (TORCHELASTIC_USE_AGENT_STORE), so that
no process would serve there, and every rank would wait for half an hour.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from nbaccel.base import env, processes, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.plan.topology import Topology

# What this process works on, its launch or a live worker's latest task, and whom that is not for.
_task_number = 0
_resting_ranks: frozenset[int] = frozenset()


def join_store(place: Topology, next_name: Callable[[], str]) -> None:
    """Let each default group meet in the launch's store under a prefix of its own."""
    process_id = os.getpid()
    was_told = False

    # The store outlives a group: with the same keys the next one would wait for ever (torch 2.13).
    def create_store(
        create: Callable[..., Any],
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal was_told
        prefix = next_name()
        # A process that a worker has started, or code that unset the variable, serves its own.
        if os.getpid() == process_id and env.snapshot().get("TORCHELASTIC_USE_AGENT_STORE"):
            _check_rank(place, rank, world_size)
            if port != place.master_port:
                # Once and from one rank: every rank is told the same address.
                if place.rank == 0 and not was_told:
                    was_told = True
                    sys.stderr.write(
                        f"nbaccel: init_process_group was told to meet at {host}:{port}; the ranks "
                        f"meet at {place.master_addr}:{place.master_port}, their launch's store.\n"
                    )
                # A group of some of the ranks: only its address tells it from others of that kind.
                if world_size != place.world_size:
                    prefix = f"{prefix}/{host}:{port}"
            host = place.master_addr
            port = place.master_port
        store = create(host, port, rank, world_size, *args, **kwargs)
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    torch_private.replace_rendezvous_store(create_store)


def _check_rank(place: Topology, rank: int, world_size: int) -> None:
    """Refuse what would wait for ranks that never come."""
    if world_size > place.world_size:
        raise ConfigError(
            f"init_process_group got world_size={world_size}, but there are {place.world_size} "
            "workers: it would wait for the others for ever. Leave rank and world_size out (they "
            f"are in the environment), or launch with num_processes={world_size}."
        )
    if world_size == place.world_size and rank != place.rank:
        raise ConfigError(
            f"init_process_group got rank={rank} in the worker of rank {place.rank}: two ranks of "
            "one number would wait for each other for ever. Leave rank and world_size out (they "
            'are in the environment), or read the rank there: rank = int(os.environ["RANK"]).'
        )


def begin_task(number: int, resting: Iterable[int]) -> None:
    """Begin a live worker's next task, in which what ranks have said before holds no more."""
    global _task_number, _resting_ranks  # noqa: PLW0603 - a process works on one thing at a time
    _task_number = number
    _resting_ranks = frozenset(resting)


def resting_ranks() -> frozenset[int]:
    """Ranks that have not been given this task."""
    return _resting_ranks


def returned_key() -> str:
    """Where a group's store has the ranks that call no collective any more in this task."""
    return f"nbaccel/returned/{_task_number}"


def say_returned(rank: int) -> None:
    """Tell ranks that still wait for this one that its function has returned."""
    if dist.is_initialized():
        # The store is gone where the rank that serves it has left.
        with contextlib.suppress(RuntimeError):
            torch_private.default_store().append(returned_key(), f"{rank} ")


def serve_store(place: Topology, listening_socket: int) -> Any:
    """Serve the rendezvous store, which all ranks join as clients, on the notebook's socket."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.master_addr,
        place.master_port,
        is_master=True,
        # Rank 0 joins as a client later; waiting here would wait for this very process.
        wait_for_workers=False,
        **processes.store_options(listening_socket),
    )
