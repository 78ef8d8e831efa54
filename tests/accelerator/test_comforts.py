"""Beside training: saving, trackers, a progress bar, the check for drift, a profile, a flag."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nbaccel import Accelerator, FullyShardedDataParallelPlugin, ProfileKwargs, ProjectConfiguration
from tests.accelerator.loops import line, numbers, sgd, together, told


def test_a_models_weights_are_written_once_under_the_users_names(tmp_path: Path) -> None:
    def body(accelerator: Accelerator) -> Any:
        model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        accelerator.save_model(model, tmp_path / "whole")
        accelerator.save_model(model, tmp_path / "pieces", max_shard_size="1KB")
        accelerator.save_model(model, tmp_path / "pickled", safe_serialization=False)
        accelerator.save({"rank": accelerator.process_index}, tmp_path / "object.pt")
        accelerator.wait_for_everyone()
        return {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}

    state, _ = together(body)
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert state.keys() == names
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(whole[name], state[name]) for name in names)
    index = json.loads((tmp_path / "pieces" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "pieces" / file)[name], state[name])
    pickled = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(pickled["0.weight"], state["0.weight"])
    assert torch.load(tmp_path / "object.pt", weights_only=True) == {"rank": 0}


def test_sharded_models_are_written_whole(tmp_path: Path) -> None:
    def body(accelerator: Accelerator) -> Any:
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(4, 4))
        accelerator.save_model(model, tmp_path / "model")
        return str(accelerator.distributed_type.value), accelerator.is_fsdp2

    assert together(body, fsdp_plugin=FullyShardedDataParallelPlugin()) == [("FSDP", True)] * 2
    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(written["weight"], expected.weight)


def read(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_metrics_are_logged_once_with_their_configuration(tmp_path: Path) -> None:
    def body(accelerator: Accelerator) -> Any:
        accelerator.init_trackers("run", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=3, log_kwargs={"jsonl": {"note": "first"}})
        tracker = accelerator.get_tracker("jsonl")
        tracker.log({"own": 1}, step=4)  # does nothing where there is none
        name = type(tracker).__name__
        accelerator.end_training()
        return name, len(accelerator.trackers), accelerator.process_index

    project = ProjectConfiguration(tmp_path, logging_dir=tmp_path / "logs")
    found = together(body, log_with="jsonl", project_config=project)
    assert found == [("JsonlTracker", 0, 0), ("GeneralTracker", 0, 1)]
    config, first, second = read(tmp_path / "logs" / "run.jsonl")
    assert config["config"] == {"lr": 0.1}
    assert (first["step"], first["values"], first["note"]) == (3, {"loss": 0.5}, "first")
    assert (second["step"], second["values"]) == (4, {"own": 1})


def test_a_tracker_nobody_asked_for_is_not_found(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    # As with Accelerate: before they begin, one that does nothing.
    accelerator.get_tracker("jsonl").log({"lost": 1})
    accelerator.init_trackers("run")
    assert "'wandb' finds none" in told(lambda: accelerator.get_tracker("wandb")).replace(
        "get_tracker('wandb')", "'wandb'"
    )
    assert accelerator.get_tracker("jsonl", unwrap=True).name.endswith("run.jsonl")
    accelerator.end_training()


def test_a_load_keeps_no_model_alive(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # what refers to itself would wait for it
    try:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.load_state(accelerator.save_state(tmp_path / "saved"))
        kept = weakref.ref(model)
        del model, accelerator
        assert kept() is None
    finally:
        gc.enable()


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
