"""`%%accelerate` in real kernels: what must hold whatever happens to a cell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.kernel.kernel import Cell, Kernel, wait_for

START = """\
%%accelerate -n 2 --out pids
import os, signal, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
pids, kept, x = os.getpid(), 7, torch.ones(1)
"""


def live(kernel: Kernel) -> list[int]:
    """Start two workers; returns their process ids, by rank."""
    kernel.run("%load_ext nbaccel").check()
    kernel.run(START).check()
    return workers_of(kernel)


def workers_of(kernel: Kernel) -> list[int]:
    return [int(pid) for pid in kernel.run("print(*pids)").check().stdout.split()]


@pytest.fixture(scope="module")
def alive() -> Iterator[Kernel]:
    """A kernel with two live workers."""
    with Kernel() as kernel:
        live(kernel)
        yield kernel


def told(cell: Cell) -> str:
    return "\n".join(cell.traceback)


@pytest.mark.slow
def test_an_error_while_another_rank_waits_ends_the_cell_and_names_both(alive):
    alive.run("%%accelerate\ndist.all_reduce(x)").check()
    code = "%%accelerate\nif rank == 1:\n    raise ValueError('no data')\ndist.all_reduce(x)"
    cell = alive.run(code, timeout_s=60.0)  # gloo would wait for half an hour
    assert "ValueError" in cell.error
    text = told(cell)
    assert "rank 1 of 2 raised ValueError: no data" in text
    assert "line 3" in text  # as the cell's lines are counted, the magic's line included
    assert "raise ValueError('no data')" in text
    assert "rank 0: was waiting in all_reduce" in text
    assert "nbaccel/" not in text
    assert alive.run("%%accelerate\ndist.all_reduce(x)\nx").check().displays
    assert alive.run("%accelerate pull kept\nprint(kept)").stdout.endswith("[7, 7]\n")
    alive.run("%%accelerate\ndist.destroy_process_group()").check()


@pytest.mark.slow
def test_two_hundred_cells_do_not_grow(alive):
    # A thread of IPython's writes each cell to the history: a journal is open now and then.
    alive.run("get_ipython().history_manager.enabled = False").check()
    alive.run("import torch; model, lr = torch.nn.Linear(64, 64), 0.1").check()
    processes = [psutil.Process(pid) for pid in (alive.pid, *workers_of(alive))]

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
    answer = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    assert answer.stdout.split() == ["refused"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "restart"])
def test_workers_end_with_their_kernel(fresh_kernel, end):
    live(fresh_kernel)
    running = fresh_kernel.begin("%%accelerate\nprint('in', flush=True)\ntime.sleep(600)")
    fresh_kernel.until(running, "[0-1] in")
    left = fresh_kernel.descendants()
    assert len(left) >= 3
    assert len(fresh_kernel.workers()) == 2
    if end == "kill":
        fresh_kernel.kill()
    else:
        fresh_kernel.manager.restart_kernel(now=False)
    assert wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in left))
