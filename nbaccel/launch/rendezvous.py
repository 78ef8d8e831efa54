"""Where the default process group of a worker meets: in the store that the launch serves.

Code written for `mp.spawn` chooses an address of its own (`MASTER_PORT = "12355"`), where rank 0
would serve a store. In a worker all ranks are clients (TORCHELASTIC_USE_AGENT_STORE), so that
nobody would serve there, and every rank would wait for half an hour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nbaccel import env
from nbaccel.errors import ConfigError
from nbaccel.topology import Topology

__all__ = ["meet_here"]

_Create = Callable[..., Any]


def meet_here(place: Topology, name: Callable[[], str]) -> None:
    """Let each default group meet in the launch's store, under a prefix of its own.

    The store is the launch's and outlives a group. Torch uses the same keys in it for the next one,
    whose ranks then wait for addresses of the first for ever (torch 2.13, `torchrun` too).

    Args:
        place: This worker's place.
        name: Gives the next group's prefix, the same on all ranks.
    """
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    rendezvous._create_c10d_store = _Meeting(place, name, rendezvous._create_c10d_store)  # type: ignore[attr-defined]


class _Meeting:
    """Takes the place of torch's `_create_c10d_store`."""

    def __init__(self, place: Topology, name: Callable[[], str], create: _Create) -> None:
        self._place = place
        self._name = name
        self._create = create
        self._pid = os.getpid()
        self._told = False

    def __call__(
        self, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        place, prefix = self._place, self._name()
        # A process that a worker has started, or code that unset the variable, serves its own.
        if os.getpid() == self._pid and env.snapshot().get("TORCHELASTIC_USE_AGENT_STORE"):
            _check(place, rank, world_size)
            if port != place.master_port:
                self._tell(hostname, port)
                if world_size != place.world_size:  # some of the ranks, told apart by the address
                    prefix = f"{prefix}/{hostname}:{port}"
            hostname, port = place.master_addr, place.master_port
        store = self._create(hostname, port, rank, world_size, *args, **kwargs)
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def _tell(self, hostname: str, port: int) -> None:
        if self._told or self._place.rank != 0:
            return
        self._told = True
        here = self._place
        sys.stderr.write(
            f"nbaccel: init_process_group was told to meet at {hostname}:{port}; the ranks meet at "
            f"{here.master_addr}:{here.master_port} instead, where their launch serves the store.\n"
        )


def _check(place: Topology, rank: int, world_size: int) -> None:
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
