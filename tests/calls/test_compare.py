"""Runs side by side, and whether more workers were worth it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbaccel
from nbaccel import Accelerator, RunConfig, notebook_launcher
from nbaccel.errors import ConfigError


def train(model: nn.Module, wait_s: float = 0.0) -> None:
    accelerator = Accelerator()
    data = DataLoader(TensorDataset(torch.ones(240, 4)), batch_size=4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    model, optimizer, loader = prepared
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        # The more ranks, the longer each step: nothing is won.
        time.sleep(wait_s * accelerator.num_processes)


def rows_of(text: str) -> dict[str, list[str]]:
    """Name of a row → its cells."""
    lines = [line.strip().split("  ") for line in text.splitlines()]
    return {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}


def test_two_runs_are_laid_side_by_side(tmp_path: Path) -> None:
    one = notebook_launcher(train, (nn.Linear(4, 2), 0.03), 1)
    two = notebook_launcher(train, (nn.Linear(4, 2), 0.03), 2)
    compared = nbaccel.compare(one, two)
    rows = rows_of(str(compared))
    assert rows["run"] == ["train on 1 worker", "train on 2 workers"]
    assert rows["steps"] == ["60", "30"]
    assert all("→" in cell for cell in rows["loss"])
    html = compared._repr_html_()
    assert html.count("<img") == 1, "one chart for the metric that both have"
    assert "train on 2 workers" in html
    saved = tmp_path / "one.json"
    one.report(saved)
    assert str(nbaccel.compare(str(saved), two.report())) == str(compared)
    # Each of two ranks takes twice as long for half as many steps.
    (advice,) = two.report().facts.advice
    assert "times the samples per second of 1 rank (an earlier run of train)" in advice
    assert "num_processes=1" in advice
    assert not one.report().facts.advice


def test_one_worker_is_measured_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 2)

    def slower_together(model: nn.Module) -> None:
        train(model, 0.03)  # far longer than what a loaded machine adds to a step

    results = notebook_launcher(slower_together, (model,), 2, compare=20)
    assert "20 steps in one worker first, to compare" in capfd.readouterr().err
    (advice,) = results.report().facts.advice
    assert "an earlier run of slower_together" in advice
    assert results.report().to_dict()["title"] == "slower_together"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], r"got 0: two runs or more"),
        ([3, 4], r"got 3, which has no report"),
        (["missing.json", "x.json"], r"missing\.json.*cannot be read as a report"),
    ],
)
def test_what_is_no_run_is_refused(runs: list[object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        nbaccel.compare(*runs)


def test_too_few_steps_say_nothing() -> None:
    with pytest.raises(ConfigError, match="at least 10"):
        RunConfig(compare=3)
