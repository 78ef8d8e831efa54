from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, ProfileKwargs
from tests.accelerator.loops import line, numbers, sgd, together


def test_one_bar_is_shown_for_all_processes_with_their_mean_loss(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def body(accelerator: Accelerator) -> Any:
        model = line()
        model, optimizer, loader = accelerator.prepare(model, sgd(model, 0.0), numbers(8, 2))
        for batch in accelerator.progress(loader, "training"):
            loss = (model(batch[0]) * 0 + accelerator.process_index).mean()
            accelerator.backward(loss)
            accelerator.wait_for_everyone()
            optimizer.step()
            optimizer.zero_grad()
        return accelerator._progress

    assert together(body) == [None, None]
    shown = capfd.readouterr().err
    assert "training: 100%" in shown
    assert "2/2" in shown
    assert "processes=2" in shown
    assert "samples/s=" in shown
    assert "loss=0.5" in shown.replace("loss=0.5000", "loss=0.5")
    assert "4/4" not in shown


def drift(accelerator: Accelerator) -> Any:
    def check() -> tuple[bool, str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fine = accelerator.check_in_sync()
        return fine, "\n".join(str(w.message) for w in caught if "drifted" in str(w.message))

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, optimizer, loader = accelerator.prepare(model, sgd(model), numbers(8, 1))
    found = [check()]
    if accelerator.process_index == 1:
        with torch.no_grad():
            accelerator.unwrap_model(model)[1].weight[0, 1] += 1e-6
    found.append(check())
    with torch.no_grad():
        accelerator.unwrap_model(model)[1].weight.copy_(torch.eye(2))
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + accelerator.process_index)
    found.append(check())
    optimizer.param_groups[0]["lr"] = 0.1
    for number, _ in enumerate(loader):
        if number == accelerator.process_index:
            break
    found.append(check())
    return found


def test_drifting_apart_is_noticed_by_name() -> None:
    main, other = together(drift)
    assert [fine for fine, _ in main] == [fine for fine, _ in other] == [True, False, False, False]
    assert [text for _, text in other] == [""] * 4  # it is said once
    none, changed, rates, batches = (text for _, text in main)
    assert none == ""
    assert "1.weight differs from process 0's on process 1\n" in changed
    assert "0.weight" not in changed
    assert "learning rate of optimizer 0, group 0" in rates
    assert "0.1, 0.2 by process" in rates
    assert "weight" not in rates.split("\nThey")[0]
    assert "batches used of loader 0" in batches
    assert "1 (epoch 0), 2 (epoch 0) by process" in batches


def test_the_profiler_writes_a_trace_per_process(tmp_path: Path) -> None:
    def body(accelerator: Accelerator) -> Any:
        with accelerator.profile() as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        return any(event.key == "aten::matmul" for event in profiler.key_averages())

    handlers = [ProfileKwargs(output_trace_dir=tmp_path / "traces", record_shapes=True)]
    assert together(body, kwargs_handlers=handlers) == [True, True]
    for rank in (0, 1):
        trace = json.loads((tmp_path / "traces" / f"profile_{rank}.json").read_text())
        assert any(event.get("name") == "aten::matmul" for event in trace["traceEvents"])


def test_a_flag_of_one_process_is_seen_by_all_and_taken_down() -> None:
    def body(accelerator: Accelerator) -> Any:
        before = accelerator.check_trigger()
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        return before, accelerator.check_trigger(), accelerator.check_trigger()

    assert together(body) == [(False, True, False)] * 2
    assert together(body, n=1) == [(False, False, False)]
