from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nbaccel import Accelerator, FullyShardedDataParallelPlugin
from nbaccel.errors import ConfigError
from nbaccel.utils import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    merge_fsdp_weights,
)
from tests.accelerator.loops import sgd, together


def save_in_shards(folder: Path) -> dict[str, torch.Tensor]:
    def body(accelerator: Accelerator) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        model, _ = accelerator.prepare(model, sgd(model))
        accelerator.save_state(folder)
        return accelerator.get_state_dict(model)

    return together(body, fsdp_plugin=FullyShardedDataParallelPlugin())[0]


def test_shards_become_one_file(tmp_path: Path) -> None:
    weights = save_in_shards(tmp_path / "state")
    merge_fsdp_weights(tmp_path / "state" / "pytorch_model_fsdp_0", tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert {k: v.tolist() for k, v in merged.items()} == {k: v.tolist() for k, v in weights.items()}
    merge_fsdp_weights(tmp_path / "state", tmp_path / "bin", safe_serialization=False)
    assert set(torch.load(tmp_path / "bin" / "pytorch_model.bin")) == set(weights)
    merge_fsdp_weights(tmp_path / "state", tmp_path / "last", remove_checkpoint_dir=True)
    assert not (tmp_path / "state" / "pytorch_model_fsdp_0").exists()
    with pytest.raises(ConfigError, match=r"no shards of one model: found were none"):
        merge_fsdp_weights(tmp_path / "state", tmp_path / "none")


def test_transformers_is_told_to_load_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    enable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
