"""A hundred launches in one process, every tenth failing in another way: nothing may grow."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbaccel import LaunchTimeout, WorkerDied, WorkerFailed, notebook_launcher
from tests import worker_functions as workers
from tests.isolation import isolated
from tests.process import descriptors

LAUNCHES, SETTLED = 100, 20
MIB = 2**20


@dataclass(frozen=True)
class Holdings:
    """What this process holds, and what its children are."""

    descriptors: int
    memory_files: int
    threads: int
    children: int
    segments: int
    rss_mib: float
    mappings: int


def holdings() -> Holdings:
    gc.collect()
    me, fds = psutil.Process(), descriptors()
    return Holdings(
        descriptors=len(fds),
        memory_files=sum("/memfd:" in target for target in fds.values()),
        threads=threading.active_count(),
        children=len(me.children(recursive=True)),
        segments=len(list(Path("/dev/shm").iterdir())),
        rss_mib=me.memory_info().rss / MIB,
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
    )


def work(model: nn.Module, mark: int) -> tuple[int, int]:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(mark)
    return workers.rank(), mark


def reduce(model: nn.Module, mark: int) -> tuple[int, int]:
    workers.join()
    dist.all_reduce(torch.ones(1))
    return work(model, mark)


def failing(end: Callable[[], None]) -> Callable[[nn.Module, int], None]:
    def train(model: nn.Module, mark: int) -> None:
        work(model, -1)
        if workers.rank() == 1:
            end()
        workers.sleep_for_ever()

    return train


def raise_it() -> None:
    raise ValueError("on purpose")


@contextlib.contextmanager
def interrupted_soon() -> Iterator[None]:
    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        thread.join()
        return
    pytest.fail("the launch ended without an interrupt")


def launch_and_fail(number: int, model: nn.Module) -> None:
    kinds: list[tuple[type[BaseException], Callable[[], None], float | None]] = [
        (ValueError, raise_it, None),
        (WorkerFailed, lambda: os._exit(3), None),
        (WorkerDied, lambda: workers.kill_self(signal.SIGKILL), None),
        (WorkerDied, workers.segfault, None),
        (LaunchTimeout, workers.sleep_for_ever, 0.3),
    ]
    if number % (len(kinds) + 1) == len(kinds):
        with interrupted_soon():
            notebook_launcher(failing(workers.sleep_for_ever), (model, 0), 2)
        return
    expected, end, timeout = kinds[number % (len(kinds) + 1)]
    with pytest.raises(expected):
        notebook_launcher(failing(end), (model, 0), 2, timeout=timeout)


@pytest.mark.slow
@isolated(timeout_s=800)
def test_a_hundred_launches_leave_nothing_behind() -> None:
    model = nn.Linear(256, 256)
    settled, mark = None, 0.0
    for number in range(LAUNCHES):
        if number == SETTLED:
            settled = holdings()
        if number % 10 == 9:
            launch_and_fail(number // 10, model)
            assert bool((model.weight == mark).all()), "a failed launch leaves the model alone"
            continue
        mark = float(number)
        function = reduce if number % 5 == 0 else work
        method = "fork" if number % 4 == 0 else "template"
        found = notebook_launcher(function, (model, number), 2, start_method=method)
        assert found == [(0, number), (1, number)]
        assert bool((model.weight == mark).all())
    assert settled is not None
    end = holdings()
    print(settled, end, sep="\n")
    for name in ("descriptors", "memory_files", "threads", "children"):
        assert getattr(end, name) <= getattr(settled, name), name
    assert end.segments <= settled.segments + 2, "others on this machine have segments, too"
    assert end.mappings <= settled.mappings + 20
    assert end.rss_mib < settled.rss_mib + 25
