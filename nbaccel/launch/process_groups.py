"""What torch's process groups need in a worker: a store, and an end without a deadlock.

The deadlock is a fault of torch 2.13, not of ours; `docs/upstream.md` has the stack. Where groups
meet is `rendezvous`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nbaccel import ports
from nbaccel.topology import Topology

__all__ = ["counted", "keep", "serve_store"]


def keep() -> None:
    """Let no process group be destructed before this process leaves.

    ~ProcessGroupGloo joins a thread that may be waiting for the GIL to drop a finished work, while
    the destructor holds it: a deadlock, met in every fifth to thirtieth DDP run that ends by
    `destroy_process_group()` (torch 2.13; the stack is in docs/upstream.md). Shutting a group down
    works as before; only its C++ object outlives it. (A live worker closes what that leaves open:
    `pool/groups.py`.)
    """
    c10d = dist.distributed_c10d
    kept: list[Any] = []

    class Keeping(dict[Any, Any]):
        def __setitem__(self, group: Any, value: Any) -> None:
            kept.append(group)
            super().__setitem__(group, value)

    c10d._pg_map = Keeping(c10d._pg_map)


def counted() -> Callable[[], str]:
    """Names for the default groups of one process: `group_0`, `group_1` and so on."""
    numbers = itertools.count()
    return lambda: f"group_{next(numbers)}"


def serve_store(place: Topology, listener: int) -> Any:
    """Serve the rendezvous store on the socket that the notebook bound.

    So it listens on loopback only, and no port is ever chosen first and bound later. All ranks,
    this one too, join it as clients (TORCHELASTIC_USE_AGENT_STORE).

    Returns:
        The store, which serves as long as it is held.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.master_addr,
        place.master_port,
        is_master=True,
        wait_for_workers=False,
        **ports.store_options(listener),
    )
