"""What the workers do. The text of this file is run as a notebook cell before every measurement.

So the functions are the notebook's own (`__main__`), as a user's are, and not importable ones.
Every body gets its rank first. For spawn the same text is also written to a module.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def build_model() -> torch.nn.Module:
    """1 GiB of fp32 weights, built on one thread so that a fresh kernel stays fresh."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = []
    for _ in range(64):
        layer = torch.nn.utils.skip_init(torch.nn.Linear, 2048, 2048, bias=False)
        torch.nn.init.constant_(layer.weight, 0.5)
        layers.append(layer)
    torch.set_num_threads(num_threads)
    return torch.nn.Sequential(*layers)


def work_in_kernel() -> None:
    """What a user does before launching: matrix products and a backward, on all threads."""
    torch.set_num_threads(max(2, torch.get_num_threads()))
    weight = torch.randn(1500, 1500, requires_grad=True)
    for _ in range(3):
        torch.relu(weight @ weight).sum().backward()


def noop(rank: int) -> int:
    return rank


def touch_model(_rank: int, model: torch.nn.Module) -> float:
    return sum(weight.view(-1)[0].item() for weight in model.parameters())


def adamw_step(_rank: int) -> float:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    loss = torch.nn.functional.cross_entropy(
        wrapped(torch.ones(32, 64)), torch.zeros(32, dtype=torch.long)
    )
    loss.backward()
    optimizer.step()
    return loss.item()


def matmul(_rank: int) -> float:
    """An operation big enough for torch to use all its threads."""
    square = torch.ones(1024, 1024)
    return (square @ square).sum().item()


def check_in(rank: int, folder: str) -> None:
    """Leave the worker's pid where the harness finds it, and say that it is there."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    print(f"HERE {rank}", flush=True)


def stamp(folder: str) -> None:
    """The moment of the mishap, on a clock that all processes of the machine share."""
    Path(folder, "at").write_text(str(time.monotonic()))


def read_all(rank: int, model: torch.nn.Module, folder: str) -> None:
    for weight in model.parameters():
        weight.detach().sum()
    check_in(rank, folder)
    Path(folder, f"ready-{rank}").touch()
    deadline = time.monotonic() + 90
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def change_by_sgd(_rank: int, model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for weight in model.parameters():
        weight.grad = weight.detach()
    optimizer.step()


def change_by_hand(_rank: int, model: torch.nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)


def stuck_in_collective(rank: int, folder: str) -> None:
    check_in(rank, folder)
    if rank == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(8))


def all_stuck_in_receive(rank: int, folder: str) -> None:
    """No rank runs Python code: nobody's exception breaks the others' connections."""
    check_in(rank, folder)
    dist.recv(torch.ones(8), src=1 - rank)


def asleep(rank: int, folder: str) -> None:
    check_in(rank, folder)
    time.sleep(3600)


def killed(rank: int, folder: str) -> None:
    check_in(rank, folder)
    if rank == 1:
        time.sleep(0.5)
        stamp(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(8))


def boom(rank: int, folder: str) -> None:
    check_in(rank, folder)
    if rank == 1:
        time.sleep(0.5)
        stamp(folder)
        raise ValueError("boom")
    dist.all_reduce(torch.ones(8))


def report(**values: Any) -> None:
    print("@@" + json.dumps(values), flush=True)
