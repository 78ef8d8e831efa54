"""What a cell shows when a launch fails, in a real kernel: few lines, all of them the user's."""

from __future__ import annotations

import re

import pytest

from tests.kernel.kernel import Kernel

SETUP = """
import time, torch, torch.distributed as dist
from nbaccel import notebook_launcher
model = torch.nn.Linear(4, 2)
"""


class Notebook(Kernel):
    def error(self, code, *, interrupt_at=""):
        """Run a cell; its error's name and lines, or None where it did not raise."""
        running = self.begin(code)
        if interrupt_at:
            self.until(running, interrupt_at)
            self.interrupt()
        cell = self.finish(running)
        return (cell.error, cell.traceback) if cell.error else None


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as opened:
        opened.error(SETUP)
        yield opened


def test_a_library_s_frames_are_one_line_without_folders(notebook):
    _, lines = notebook.error(
        "notebook_launcher(lambda m: m(torch.ones(3, 5)), (model,), num_processes=2)"
    )
    assert any(line.startswith("  raised inside forward (torch/nn/") for line in lines)
    assert lines[-2].endswith("print(sys.last_value.__cause__)")
    assert lines[-1].startswith(
        "%debug cannot enter a worker: run the function with num_processes=1"
    )
    _, lines = notebook.error("import sys; raise SystemError(sys.last_value.__cause__)")
    assert any("torch/nn/modules/module.py" in line for line in lines)


def test_a_mistake_shows_the_cell_and_the_text(notebook):
    name, lines = notebook.error("notebook_launcher(print, model, num_processes=2)")
    assert name == "WrongArguments"
    assert re.fullmatch(r"  Cell In\[\d+\], line 1", lines[0])
    assert lines[1] == "  ---->   1 notebook_launcher(print, model, num_processes=2)"
    assert lines[2].startswith("WrongArguments: args=Linear(")
    name, lines = notebook.error(
        "import threading\n"
        "notebook_launcher(print, (threading.Lock(),), num_processes=2, start_method='template')"
    )
    assert name == "NotSendable"
    assert lines[2].startswith("NotSendable: args[0] (a _thread.lock) cannot be sent")
    assert len(lines) <= 8
    # In one process the error is the user's own.
    name, lines = notebook.error(
        "def look(batch):\n    return batch['pixel']\n"
        "notebook_launcher(look, ({},), num_processes=1)"
    )
    assert name == "KeyError"
    assert not [line for line in lines if "nbaccel" in line and "launcher(" not in line]


def test_an_interrupt_tells_where_each_rank_was(notebook):
    name, lines = notebook.error(
        "def wait():\n"
        "    print('ready')\n"
        "    time.sleep(60)\n"
        "notebook_launcher(wait, num_processes=2)",
        interrupt_at="ready",
    )
    assert name == "KeyboardInterrupt"
    where = re.compile(
        r"  rank [01] was running \(Cell In\[\d+\], line 3\) when nbaccel stopped it"
    )
    assert lines[0] == "KeyboardInterrupt: all 2 workers have been stopped"
    assert len(lines) == 3
    assert all(where.fullmatch(line) for line in lines[1:])
