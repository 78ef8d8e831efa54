"""The board of `%accelerate`: what workers are, have and hold, while cells run and in between."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.kernel.kernel import WAIT_S, Cell, Kernel

pytestmark = pytest.mark.slow
STATE_OF_TIMERS = """
import asyncio, threading
timers = [h for h in asyncio.get_running_loop()._scheduled
          if not h.cancelled() and "_poll_between_cells" in repr(h)]
print(len(timers), sorted(t.name for t in threading.enumerate() if "accel" in t.name.lower()))
"""


@pytest.fixture
def kernel_with_workers() -> Iterator[Kernel]:
    found = Kernel()
    try:
        found.run("%load_ext nbaccel").check()
        found.run("%accelerate restart -n 2").check()
        yield found
    finally:
        found.close()


def between_cells(
    kernel: Kernel, until: Callable[[str], bool], *, timeout_s: float = WAIT_S
) -> list[str]:
    """What outputs of earlier cells become while no cell runs, until one of them is so."""
    deadline = time.monotonic() + timeout_s
    texts: list[str] = []
    while not (texts and until(texts[-1])) and time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            continue
        if message["msg_type"] == "update_display_data":
            texts.append(message["content"]["data"]["text/plain"])
    return texts


def boards_of(cell: Cell) -> list[list[str]]:
    """The rows of each board that a cell has renewed, below the head of its table."""
    return [update["text/plain"].splitlines() for update in cell.updates]


def test_the_board_of_workers_follows_the_cells_until_they_are_stopped(kernel_with_workers):
    (board,) = kernel_with_workers.run("%accelerate").check().displays
    assert "names" not in board["text/plain"]
    assert "group" not in board["text/plain"]
    changed = kernel_with_workers.run(
        "%%accelerate\n_hidden, one, two = 0, 1, 2\n"
        "from nbaccel import Accelerator\nAccelerator().wait_for_everyone()"
    ).check()
    update = changed.updates[-1]
    rows = update["text/plain"].splitlines()[2:]
    assert len(rows) == 2
    for row in rows:
        assert "idle" in row
        assert "gloo, 2 ranks" in row
        assert "one, two, Accelerator" in row
        assert "_hidden" not in row
    assert "gloo, 2 ranks" in update["text/html"]
    kernel_with_workers.run("%%accelerate\nthree = 3").check()
    stopped = kernel_with_workers.run("%accelerate stop").check().updates
    last_board = stopped[-1]["text/plain"]
    assert last_board.startswith("stopped: it was stopped on request. The next cell")
    assert "Before that:\n" in last_board
    assert last_board.count("one, two, Accelerator") == 2, "a saved notebook keeps what they were"
    assert kernel_with_workers.run("1;").check().updates == []
    assert kernel_with_workers.run(STATE_OF_TIMERS).check().stdout == "0 []\n"


def test_while_a_cell_runs_the_board_says_which_how_long_and_what_is_waited_at(kernel_with_workers):
    kernel_with_workers.run("%%accelerate\nold = 1").check()
    (board,) = kernel_with_workers.run("%accelerate").check().displays
    assert "under 1 min" in board["text/plain"]
    began = time.monotonic()
    cell = kernel_with_workers.run(
        """\
        %%accelerate
        import os, time
        from nbaccel import Accelerator
        taken = bytearray(300_000_000)
        time.sleep(4 if os.environ["RANK"] == "0" else 0)
        Accelerator().wait_for_everyone()
        """
    ).check()
    seconds = time.monotonic() - began
    assert not any(text.get("text/plain", "").startswith("idle") for text in cell.displays)
    boards = boards_of(cell)
    assert 3 <= len(boards) <= seconds + 2, "about one a second"
    *during, after = boards
    assert all(re.match(r"running cell In\[\d+\]\. 2 CPU workers", lines[0]) for lines in during)
    assert after[0].startswith("idle. ")
    times = [float(re.findall(r"running +([\d.]+) s", lines[2])[0]) for lines in during]
    assert times == sorted(times)
    assert times[-1] - times[0] >= 1.5
    assert not [line for lines in during for line in lines if "_magic (" in line]
    waiting = [line for lines in during for line in lines if "waiting in " in line]
    assert waiting, during
    assert all(line.startswith("1 ") and "In[" in line for line in waiting)
    assert "old" in during[0][2], "names as of the last answer"
    memory = [float(re.findall(r"([\d.]+) MiB", lines[2])[0]) for lines in (during[-1], boards[0])]
    assert memory[0] > 400, "the memory is what the worker has now"


def test_between_cells_a_killed_worker_is_seen_and_told_by_the_next_cell(kernel_with_workers):
    ranks = "%%accelerate --out pid\nimport os\npid = os.getpid()"
    kernel_with_workers.run(ranks).check()
    pid = int(kernel_with_workers.run("print(pid[1])").check().stdout)
    kernel_with_workers.run("%accelerate").check()
    os.kill(pid, signal.SIGKILL)
    texts = between_cells(kernel_with_workers, lambda text: "gone" in text)
    assert "idle, but rank 1 has ended: the next cell tells why" in texts[-1]
    assert re.search(r"^1 +gone +- +- +-$", texts[-1], re.MULTILINE), "nor its names"
    told = kernel_with_workers.run("%%accelerate\n1")
    assert told.error == "WorkerDied"
    assert "_magic (" not in "\n".join(told.traceback), "where its template was forked"
    assert "SIGKILL" in "\n".join(told.traceback)
    assert boards_of(told)[-1][0].startswith("broken: ")
    assert not kernel_with_workers.run("%%accelerate\n1").error
