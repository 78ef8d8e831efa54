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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["template", "fork"])
@pytest.mark.parametrize("what", STUCK)
def test_stop_ends_the_cell(kernel, what, method):
    before = {p.pid for p in kernel.workers()}
    running = kernel.begin(CELL.format(what=STUCK[what], method=method))
    kernel.until(running, "[0-1] stuck now")
    assert len(kernel.workers()) >= len(before) + 2
    pressed = time.monotonic()
    kernel.interrupt()
    cell = kernel.finish(running)
    took = time.monotonic() - pressed
    assert cell.error == "KeyboardInterrupt"
    assert "the model is as it was" in "\n".join(cell.traceback)
    assert took < BOUND_S
    assert wait_for(lambda: {p.pid for p in kernel.workers()} == before)
    check = "assert torch.equal(net.weight, value); print(notebook_launcher(workers.rank, (), 2))"
    assert kernel.run(check).check().stdout == "[0, 1]\n"


def stopped(kernel: Kernel, code: str, *, times: int = 1) -> float:
    """Press Stop in a cell that is stuck, and launch again; how long the cell took to end."""
    running = kernel.begin(code)
    kernel.until(running, "stuck now")
    pressed = time.monotonic()
    kernel.interrupt()
    for _ in range(times - 1):
        time.sleep(0.5)
        kernel.interrupt()
    assert kernel.finish(running).error == "KeyboardInterrupt"
    took = time.monotonic() - pressed
    assert "[0, 1]" in kernel.run("print(notebook_launcher(workers.rank, (), 2))").check().stdout
    return took


def test_stop_before_workers_are_there_twice_and_while_the_template_is_stopped(kernel):
    stopped(kernel, "print('stuck now'); time.sleep(600)")
    code = """
        def slow_to_go():
            try:
                print("stuck now")
                time.sleep(600)
            finally:
                time.sleep(600)
        notebook_launcher(slow_to_go, (), 2)
        """
    stopped(kernel, code, times=2)
    code = """
        import signal
        def stuck():
            print("stuck now")
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(600)
        notebook_launcher(stuck, (), 2, start_method="template")
        """
    assert stopped(kernel, code) < 4.0, "about 0.1 s on a quiet machine; it was 10 s"


STORM = """
import itertools
for i in itertools.count():
    print(i, "line of", os.environ["RANK"])
    {what}
"""
LAUNCH = """
import signal
def storm():
{body}
notebook_launcher(storm, (), 2)
"""


def program(way: str, body: str) -> str:
    """What a launch's function or a live cell runs."""
    if way == "cell":
        return "%%accelerate\nimport os, signal, time\n" + body
    return LAUNCH.format(body="".join(f"    {line}\n" for line in body.strip().splitlines()))


@pytest.fixture(scope="module")
def live_kernel(kernel: Kernel) -> Kernel:
    kernel.run("%load_ext nbaccel").check()
    kernel.run("%%accelerate --num_processes 2\nmine = os.getpid()").check()
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("way", ["launch", "cell"])
def test_stop_in_a_storm_of_lines_does_not_wait_until_all_are_shown(live_kernel, way):
    running = live_kernel.begin(program(way, STORM.format(what="")))
    live_kernel.until(running, " 5000 line of")
    time.sleep(2.0)
    live_kernel.interrupt()
    pressed = time.monotonic()
    cell = live_kernel.finish(running)
    assert time.monotonic() - pressed < 20.0, "about 0.4 s on a quiet machine"
    assert cell.error == "KeyboardInterrupt"
    shown = [text for text in cell.stdout.splitlines() if not text.startswith("nbaccel: ")]
    assert " not shown" in cell.stdout
    assert cell.stderr == ""
    last = {text.split("]")[0]: int(text.split()[1]) for text in shown}
    assert set(last) == {"[0", "[1"}, "the last lines of both ranks are there"
    assert min(last.values()) > 5000
    assert live_kernel.run("%%accelerate\nassert mine == os.getpid()").check()


STOPPED = """
print("stopped now")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["launch", "cell"])
def test_stop_reaches_a_worker_that_is_stopped_by_a_signal(live_kernel, way):
    running = live_kernel.begin(program(way, STOPPED))
    live_kernel.until(running, "[0-1] stopped now")
    live_kernel.interrupt()
    pressed = time.monotonic()
    assert live_kernel.finish(running).error == "KeyboardInterrupt"
    assert time.monotonic() - pressed < 2.0, "about 0.1 s on a quiet machine; it was 1.3 s or more"
    live_kernel.run("%%accelerate\nassert mine == os.getpid()").check()


WAITING = """
def train():
    dist.init_process_group("gloo")
    print("here we go")
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(600)
notebook_launcher(train, (), 2)
"""


@pytest.mark.slow
def test_the_dashboard_and_stop_name_the_lines(kernel):
    running = kernel.begin(WAITING)
    kernel.until(running, "here we go")
    deadline = time.monotonic() + 2 * BOUND_S
    while not all(part in str(running[1].displays) for part in ("[0] waiting in", "[1] running (")):
        assert time.monotonic() < deadline, running[1].displays[-1:]
        kernel.look(running, timeout_s=2 * BOUND_S)
    kernel.interrupt()
    cell = kernel.finish(running)
    seen = str(cell.displays)
    assert "[0] waiting in barrier (Cell In[" in seen
    assert "line 5)" in seen
    assert "[1] running (Cell In[" in seen
    told = "\n".join(cell.traceback)
    assert cell.error == "KeyboardInterrupt"
    assert "rank 0 was waiting in barrier (Cell In[" in told
    assert "rank 1 was running (Cell In[" in told


@pytest.mark.slow
def test_a_rank_that_computes_is_not_asked_and_a_death_after_a_question_is_told(kernel):
    cell = kernel.run(
        """
        def train():
            end = time.monotonic() + 6
            if os.environ["RANK"] == "0":
                time.sleep(10)
                os._exit(3)
            while time.monotonic() < end:
                pass
            time.sleep(600)
        notebook_launcher(train, (), 2)
        """
    )
    told = "\n".join(cell.traceback)
    assert "left with exit code 3" in told
    assert "time.sleep(10)" not in told, "where it once was is not where it has died"
