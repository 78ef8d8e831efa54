"""What a running cell shows of its ranks, where and when, and what stays of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, notebook_launcher
from nbaccel.base.processes import process_use
from nbaccel.base.training_metrics import Metrics
from nbaccel.devices.cuda import CudaDevice
from nbaccel.output import publish
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus
from nbaccel.output.publish import CellPlace
from tests.output.panel.finished import PLAN, report

GIB = 2**30


def row(rank: int, doing: str = "", **more: Any) -> RankStatus:
    settled = {"state": "running", "seconds": 2.0, "rss_bytes": GIB} | more
    return RankStatus(rank=rank, doing=doing, **settled)


class Cell:
    """The notebook's end: what was published, and what stands in the cell by its handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publish, "has_cells", lambda: True)
        monkeypatch.setattr(publish, "publish_display", self.take)
        self.outputs: dict[str, Mapping[str, str]] = {}
        self.taken = 0

    def take(self, content: Mapping[str, Any]) -> None:
        self.taken += 1
        handle = content["transient"]["display_id"]
        assert content.get("update", False) == (handle in self.outputs)
        self.outputs[handle] = content["data"]

    @property
    def text(self) -> str:
        (found,) = self.outputs.values()
        return found["text/plain"]

    @property
    def html(self) -> str:
        (found,) = self.outputs.values()
        return found["text/html"]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    return Cell(monkeypatch)


@pytest.mark.parametrize(("seconds", "switch"), [(0.9, "1"), (5.0, "0")])
def test_a_short_cell_shows_nothing_and_it_can_be_turned_off(
    seconds, switch, cell, clock, monkeypatch
):
    monkeypatch.setenv("NBACCEL_DASHBOARD", switch)
    board = Dashboard([0, 1], plan=PLAN, read_clock=clock)
    clock.now += seconds
    assert switch == "0" or board.due_in() == pytest.approx(0.1)
    board.update([row(0), row(1)])
    board.finish()
    assert cell.taken == 0


def test_ranks_that_do_the_same_are_one_line_and_too_many_lines_are_cut(cell, clock):
    board = Dashboard(range(4), plan=PLAN, read_clock=clock)
    clock.now += 12
    waiting = "waiting in all_reduce (Cell In[3], line 5)"
    board.update([row(0, waiting), row(2, waiting), row(1, waiting), row(3, rss_bytes=2 * GIB)])
    assert cell.text == (
        "4 ranks · 12.0 s\n"
        "[0-2] waiting in all_reduce (Cell In[3], line 5) · 1.0 GiB\n"
        "[3] running · 2.0 GiB"
    )
    cell.outputs.clear()
    board = Dashboard(range(64), plan=PLAN, read_clock=clock)
    clock.now += 2
    board.update([row(i, f"thing {i}") for i in range(64)])
    assert cell.text.count("\n") == 9
    assert cell.text.endswith("… and 56 more")


@pytest.mark.parametrize("word", ["failed", "stopped", "timed out", ""])
def test_afterwards_one_line_stays_with_the_peak_and_the_ending(cell, clock, word):
    place = CellPlace()
    board = Dashboard([0], place=place, plan=PLAN, read_clock=clock)
    clock.now += 2
    board.update([row(0, rss_bytes=3 * GIB, device_bytes=5 * GIB)])
    clock.now += 2
    board.update([row(0, rss_bytes=GIB)])
    clock.now += 8.3
    if not word:  # after the cell was cleared it is shown anew
        place.note_cleared()
        cell.outputs.clear()
    board.finish(ending=word)
    ending = f"{word} after " if word else ""
    assert cell.text == f"1 rank · {ending}12.3 s · up to 3.0 GiB (on the device 5.0 GiB)"


def test_a_terminal_gets_a_line_now_and_then(clock, capsys):
    board = Dashboard([0, 1], plan=PLAN, read_clock=clock)
    at = []
    for second in range(700):
        board.update([row(0, "reading")])
        if "reading" in capsys.readouterr().err:
            at.append(second)
        clock.now += 1
    assert at == [1, 3, 9, 27, 81, 243]
    board.finish(ending="failed")
    assert capsys.readouterr().err == (
        "nbaccel: 2 ranks · failed after 11 min 40 s · up to 1.0 GiB each\n"
    )


def metrics(time: float, steps: int, loss: float = 1.0) -> Metrics:
    return report(time, steps, {"loss": loss})


def test_a_whole_output_is_not_replaced_for_each_message(cell, clock):
    board = Dashboard([0], plan=PLAN, read_clock=clock)
    clock.now += 1
    board.update([row(0)])
    for i in range(110):
        clock.now += 0.03
        board.board.receive(0, metrics(clock.now, i))
        if board.is_due:
            board.update([row(0)])
    assert cell.taken == 1 + 3
    assert "step 109" not in cell.text
    board.finish()
    assert "step 109" in cell.text


def test_it_says_how_to_stop_and_is_renewed_in_place_once_a_second(cell, clock):
    board = Dashboard([0], plan=PLAN, read_clock=clock)
    clock.now += 1
    board.update([row(0)])
    assert "Stop: interrupt the cell" in cell.html
    assert "<script" not in cell.html, "no server has started this kernel"
    board.finish()
    assert "Stop" not in cell.html
    cell.outputs.clear()
    cell.taken = 0

    board = Dashboard([0, 1], plan=PLAN, read_clock=clock)
    for _ in range(30):
        clock.now += 0.1
        board.update([row(0), row(1)])
    assert cell.taken in {2, 3}, "30 times 0.1 may be less than 3"
    assert len(cell.outputs) == 1
    clock.now += 10
    assert board.due_in() == 0
    board.update([row(0), row(1)])
    assert 0 < board.due_in() <= 1, "what was missed is not made up for"


def test_a_launch_whose_output_goes_to_a_file_adds_nothing_to_it(capfd):
    notebook_launcher(time.sleep, (1.6,), 2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_launch_in_a_terminal_is_told_of_there():
    code = "import time; from nbaccel import notebook_launcher as go; go(time.sleep, (1.6,), 2)"
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stderr=theirs, timeout=100, check=True)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 0
    # What a start is waiting for is erased again.
    lines = re.sub(r"\r\x1b\[K(nbaccel: starting[^\r]*)?", "", text).splitlines()
    assert lines[0].startswith("nbaccel: 2 ranks · 1.")
    assert lines[1].startswith("nbaccel: [0-1] running · ")
    assert len(lines) == 3


MIB = 2**20


def test_a_process_weighs_what_it_holds_and_nothing_once_it_has_gone():
    code = "held = bytearray(200 << 20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        use = process_use(child.pid)
        assert use is not None
        assert 200 * MIB < use.rss_bytes < 300 * MIB
        assert 0 < use.cpu_s < 30
        child.kill()
    assert process_use(child.pid) is None


@pytest.mark.gpu
def test_the_memory_of_a_gpu_is_on_the_board_and_no_context_in_the_notebook(seen):
    def train() -> None:
        accelerator = Accelerator()
        held = torch.ones(64 * MIB, dtype=torch.uint8, device=accelerator.device)
        accelerator.log({"loss": 1.0, "on device": held})

    notebook_launcher(train, (), 1, start_method="template")
    (facts,) = seen.board.ranks.values()
    assert facts.memory.peak_device is not None
    assert facts.memory.peak_device >= 64 * MIB
    assert not torch.cuda.is_initialized()
    meter = CudaDevice().driver_meter()
    assert meter is not None
    assert all(held > 0 for held in meter.read().values())
    meter.close()
