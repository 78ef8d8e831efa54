from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from nbaccel import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from tests.accelerator.loops import together, told


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
