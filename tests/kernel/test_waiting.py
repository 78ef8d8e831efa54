"""A launch that waits says what line each rank is at: while it waits, and when it is stopped."""

from __future__ import annotations

import time

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow

WAITING = """
def train():
    dist.init_process_group("gloo")
    print("here we go")
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(600)
notebook_launcher(train, (), 2)
"""
WITHIN_S = 120.0


def test_the_dashboard_and_stop_name_the_lines(kernel: Kernel) -> None:
    running = kernel.begin(WAITING)
    kernel.until(running, "here we go")
    deadline = time.monotonic() + WITHIN_S
    while not all(part in str(running[1].displays) for part in ("[0] waiting in", "[1] running (")):
        assert time.monotonic() < deadline, running[1].displays[-1:]
        kernel.look(running, timeout_s=WITHIN_S)
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


def test_a_rank_that_computes_is_not_asked_and_a_death_after_a_question_is_told(
    kernel: Kernel,
) -> None:
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
