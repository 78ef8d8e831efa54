"""What is said of a device that compiles: here one that the test controls."""

from __future__ import annotations

import torch

from nbaccel.abc.device import CompileCounts, UnlistedDevice
from nbaccel.base.training_metrics import Metrics
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.live_html import live_line
from nbaccel.train.gradient import CompileWatch


class CompilingDevice(UnlistedDevice):
    """A device whose compiler has done what the test says."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.programs = 0

    def compile_counts(self) -> CompileCounts:
        return CompileCounts(programs=self.programs, seconds=1.5 * self.programs)


def step(watch: CompileWatch, device: CompilingDevice, rows: int, programs: int = 0) -> str:
    """One step, in which so many programs are compiled; what was said of it before it ran."""
    with watch.step({"x": torch.zeros(rows, 4), "y": [torch.zeros(rows), "text"]}):
        device.programs += programs
        return watch.phase


def test_what_compiles_is_said_and_numbers_that_change_are_suspected(capsys):
    device = CompilingDevice()
    watch = CompileWatch(device, device.compile_counts())
    phases = [step(watch, device, 8, programs) for programs in (7, 7, 0, 0)]
    assert phases == ["compiling, step 1 of about 3", "compiling, step 2 of about 3", "", ""]
    assert watch.counts == CompileCounts(programs=14, seconds=21.0)
    assert watch.phase == ""
    assert watch.named_causes == set()
    device = CompilingDevice()
    watch = CompileWatch(device, device.compile_counts())
    for programs in (7, 7, 0, 1, 1):
        step(watch, device, 8, programs)
    assert capsys.readouterr().err == ""
    for programs in (1, 1, 1):
        step(watch, device, 8, programs)
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 steps in a row compiled again" in line
    assert "as a tensor on the device" in line


def test_a_batch_of_another_size_is_named_and_the_dashboard_says_what_compiles(capsys):
    device = CompilingDevice()
    watch = CompileWatch(device, device.compile_counts())
    for rows, programs in ((8, 7), (8, 7), (8, 0), (5, 4), (3, 4)):
        step(watch, device, rows, programs)
    (line,) = capsys.readouterr().err.splitlines()
    assert "float32 [5, 4], float32 [5]) than those before (float32 [8, 4], float32 [8])" in line
    assert "6.0 s" not in line, "times differ by rank: the notebook could not fold their lines"
    assert "drop_last=True" in line
    assert "in evaluation, use the batch size of training" in line
    board = RunBoard([0], began_at=0.0)
    board.receive(0, Metrics(time=1.0, steps=1, phase="compiling, step 2 of about 3"))
    assert "compiling, step 2 of about 3" in live_line(board)
    board.receive(0, Metrics(time=9.0, steps=90, programs=14, compile_s=21.0))
    assert "14 programs compiled in 21.0 s" in live_line(board)
