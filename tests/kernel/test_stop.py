"""The Stop button: whatever the workers do, the cell ends in seconds and leaves nothing."""

from __future__ import annotations

import time

import pytest

from tests.kernel.kernel import Kernel, wait_for

BOUND_S = 60.0  # it ends a hang; how fast Stop is, the benchmarks measure

STUCK = {
    "all_reduce": "dist.all_reduce(torch.ones(1)) if rank == 1 else time.sleep(600)",
    "sleep": "time.sleep(600)",
    "a lock in C": "workers.lock_up_in_c()",
    "a loop in C": "workers.spin_in_c()",
    "deaf": "workers.ignore_everything()",
}

CELL = """
def stuck(net):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.no_grad():
        net.weight.fill_(7)
    dist.barrier()
    print("stuck now")
    {what}

net = nn.Linear(2, 2)
value = net.weight.detach().clone()
notebook_launcher(stuck, (net,), 2, start_method={method!r})
"""


@pytest.mark.parametrize("method", ["template", "fork"])
@pytest.mark.parametrize("what", STUCK)
def test_stop_ends_the_cell(kernel: Kernel, what: str, method: str) -> None:
    before = {p.pid for p in kernel.descendants()}
    running = kernel.begin(CELL.format(what=STUCK[what], method=method))
    kernel.until(running, "[0-1] stuck now")
    assert len(kernel.descendants()) >= len(before) + 2
    pressed = time.monotonic()
    kernel.interrupt()
    cell = kernel.finish(running)
    took = time.monotonic() - pressed
    assert cell.error == "KeyboardInterrupt"
    assert took < BOUND_S
    assert wait_for(lambda: {p.pid for p in kernel.descendants()} == before)
    check = "assert torch.equal(net.weight, value); print(notebook_launcher(workers.rank, (), 2))"
    assert kernel.run(check).check().stdout == "[0, 1]\n"


def test_stop_before_the_workers_are_there(kernel: Kernel) -> None:
    running = kernel.begin("print('go'); time.sleep(600)")
    kernel.until(running, "go")
    kernel.interrupt()
    assert kernel.finish(running).error == "KeyboardInterrupt"
    assert "[0, 1]" in kernel.run("print(notebook_launcher(workers.rank, (), 2))").check().stdout


def test_stop_twice_is_stop(kernel: Kernel) -> None:
    running = kernel.begin(
        """
        def slow_to_go():
            try:
                print("stuck now")
                time.sleep(600)
            finally:
                time.sleep(600)
        notebook_launcher(slow_to_go, (), 2)
        """
    )
    kernel.until(running, "[0-1] stuck now")
    kernel.interrupt()
    time.sleep(0.5)
    kernel.interrupt()
    assert kernel.finish(running).error == "KeyboardInterrupt"
    assert "[0, 1]" in kernel.run("print(notebook_launcher(workers.rank, (), 2))").check().stdout
