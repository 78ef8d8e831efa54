"""torch.multiprocessing, fork: functions of the notebook work as they are."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def enter(
    rank: int, body: Callable[..., Any], num_processes: int, port: int, args: tuple[Any, ...]
) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_processes)
    body(rank, *args)


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    mp.start_processes(
        enter, (body, num_processes, free_port(), args), num_processes, start_method="fork"
    )
