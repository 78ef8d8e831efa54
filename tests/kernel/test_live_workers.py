"""`%%accelerate` in real kernels: what must hold whatever happens to a cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.kernel.kernel import Kernel
from tests.programs import run_program

START = """\
%%accelerate -n 2 --out pids
import os, signal, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
pids, kept, x = os.getpid(), 7, torch.ones(1)
"""


@pytest.fixture(scope="module")
def alive() -> Iterator[Kernel]:
    """A kernel with two live workers."""
    with Kernel() as kernel:
        kernel.run("%load_ext nbaccel").check()
        kernel.run(START).check()
        yield kernel


@pytest.mark.slow
def test_two_hundred_cells_do_not_grow(alive):
    # A thread of IPython's writes each cell to the history: a journal is open now and then.
    alive.run("get_ipython().history_manager.enabled = False").check()
    alive.run("import torch; model, lr = torch.nn.Linear(64, 64), 0.1").check()
    worker_ids = alive.run("print(*pids)").check().stdout.split()
    processes = [psutil.Process(int(pid)) for pid in (alive.pid, *worker_ids)]

    def cells(count: int) -> None:
        for i in range(count):
            alive.run(f"lr = {i}")
            alive.run(
                "%%accelerate\nwith torch.no_grad(): model.weight.mul_(1.0)\nlr * rank"
            ).check()

    def held(process: psutil.Process) -> tuple[tuple[int, int], int, int]:
        maps = len(process.memory_maps(grouped=False))
        return (process.num_fds(), process.num_threads()), process.memory_info().rss, maps

    cells(20)
    before = [held(process) for process in processes]
    cells(200)
    for process, (fds_and_threads, rss, maps) in zip(processes, before, strict=True):
        now = held(process)
        assert now[0] == fds_and_threads
        assert now[1] < rss + 12 * 2**20
        assert now[2] < maps + 20


def test_nobody_else_can_reach_a_worker(alive):
    """Another user sees no socket to connect to, and cannot open the ones there are."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    pids = [alive.pid, alive.templates()[0].pid, *(p.pid for p in alive.workers())]
    assert len(pids) == 4  # kernel, template, two workers
    sockets = [(pid, c) for pid in pids for c in psutil.Process(pid).net_connections("unix")]
    # ipykernel's own sockets for its clients have names; nbaccel's have none.
    assert all(pid == alive.pid for pid, connection in sockets if connection.laddr)
    probe = (
        "import os, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for pid in sys.argv[1:]:\n"
        "    try: print(len(os.listdir(f'/proc/{pid}/fd')))\n"
        "    except PermissionError: print('refused')\n"
        "    try: os.pidfd_open(int(pid)); os.kill(int(pid), 2); print('killed')\n"
        "    except PermissionError: print('refused')\n"
    )
    command = [sys.executable, "-c", probe, *map(str, pids)]
    assert run_program(command).stdout.split() == ["refused"] * 8
