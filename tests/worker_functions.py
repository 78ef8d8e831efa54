"""What test launches run in their workers: light to import, because every worker imports it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOREVER_S = 600.0  # far beyond the time any test may take: to hang, and to be found out


def rank() -> int:
    return int(os.environ["RANK"])


def join() -> int:
    """Set up the gloo group; returns this worker's rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def nothing() -> None:
    pass


def whoami(*args: Any) -> tuple[Any, ...]:
    return (rank(), os.getpid(), *args)


# ------------------------------------------------------------------------- training


class Net(nn.Module):
    """Small, with buffers and tied weights."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.tied = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def fit(model: nn.Module, optimizer: str, steps: int = 3) -> nn.Module:
    """Train under DDP on data that differs by rank; returns the wrapped model."""
    parallel = DistributedDataParallel(model)
    trained = [p for p in parallel.parameters() if p.requires_grad]
    stepper = getattr(torch.optim, optimizer)(trained, lr=0.05)
    for step in range(steps):
        torch.manual_seed(100 * step + rank())
        loss = parallel(torch.randn(4, next(model.parameters()).shape[1])).pow(2).sum()
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    return parallel


def train(model: nn.Module, optimizer: str = "SGD") -> dict[str, torch.Tensor]:
    join()
    fit(model, optimizer)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# ------------------------------------------------------------------------- failing


class CallersError(Exception):
    """What a user's module may define: needs two arguments, keeps one as an attribute."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class MissingKey(KeyError):
    pass


class DiskTrouble(OSError):
    pass


class BadText(UnicodeDecodeError):
    pass


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a generator")
        self.generator = (i for i in range(3))


def kill_self(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(FOREVER_S)


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def wait_in_all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def sleep_for_ever() -> None:
    time.sleep(FOREVER_S)


def lock_up_in_c() -> None:
    """In C, asleep with the GIL held: no handler of Python's can run (sleep(3) would wake up)."""
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def spin_in_c() -> None:
    """In C, busy with the GIL held."""
    sum(range(10**15))


def ignore_everything() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    time.sleep(FOREVER_S)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
