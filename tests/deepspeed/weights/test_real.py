"""Weights of real engines' checkpoints are, bit by bit, those that the engines had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import nbaccel
from nbaccel.errors import ConfigError
from tests.deepspeed import needs
from tests.deepspeed.weights.saved import ALONE, CASES, Net

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]
ALL = [*(f"two/{name}" for name in CASES), *(f"one/{name}" for name in ALONE)]
ROUNDED = "two/0-bf16"
READ = [name for name in ALL if name != ROUNDED]
PARTITIONED = [name for name in ALL if "/3-" in name]


def notes(folder: Path, rank: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"notes_{rank}")


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same in type, shape and every bit."""
    return [name for name in {*ours, *theirs} if bits(ours.get(name)) != bits(theirs.get(name))]


def bits(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.numpy().tobytes()


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", READ)
def test_live_and_offline_weights_are_those_of_deepspeeds_functions(saved, name):
    state = nbaccel.load_fp32_state_dict(saved / name)
    live = notes(saved / name)["live"]
    assert differing(state, live) == []
    assert state["head.weight"] is state["words.weight"], "they are tied"
    assert "cache" not in state
    found = notes(saved / name)
    assert differing(found["live"], found["theirs"]) == []


def test_at_stage_0_in_bf16_they_are_the_optimizers_and_not_the_rounded_ones(saved):
    """DeepSpeed has no function for these; rounded, they must be what the model computes with."""
    found = notes(saved / ROUNDED)
    names = [name for name in found["computed"] if "weight" in name or "bias" in name]
    rounded = {name: found["live"][name].bfloat16() for name in names}
    assert differing(rounded, {name: found["computed"][name] for name in names}) == []
    assert differing(
        {n: r.float() for n, r in rounded.items()}, {n: found["live"][n] for n in names}
    )
    with pytest.raises(ConfigError, match=r"without ZeRO in 16 bit.*fp32_state_dict\(engine\)"):
        nbaccel.load_fp32_state_dict(saved / ROUNDED)


@pytest.mark.parametrize("name", [name for name in ALL if "/0-" not in name])
def test_they_are_what_deepspeeds_own_script_finds(saved, name):
    state, script = nbaccel.load_fp32_state_dict(saved / name), torch.load(saved / name / "script")
    # Some releases make float32 of all that it finds, masks and counters too.
    script = {n: t.to(state[n].dtype) for n, t in script.items()}
    only_ours = {n for n in state if n not in script}
    # Its script leaves out frozen parameters at stage 1, though the checkpoint has them.
    assert only_ours == ({"fixed.weight", "fixed.bias"} if "/1-" in name else set())
    assert differing({n: state[n] for n in script}, script) == []


@pytest.mark.parametrize("name", READ)
def test_files_have_the_same_weights_and_each_tied_one_once(saved, name, tmp_path):
    written = nbaccel.zero_to_fp32(saved / name, tmp_path, max_shard_size=600)
    state = nbaccel.load_fp32_state_dict(saved / name)
    assert (
        differing(read_all(tmp_path), {n: t for n, t in state.items() if n != "head.weight"}) == []
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    weights = [path for path in written.files if path.suffix == ".safetensors"]
    assert len(weights) > 2
    assert {*index["weight_map"].values()} == {path.name for path in weights}
    assert index["metadata"]["total_size"] == written.num_bytes
    with safe_open(tmp_path / index["weight_map"]["words.weight"], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "words.weight"}


def test_safetensors_own_loader_takes_the_tied_model(saved, tmp_path):
    from safetensors.torch import load_model

    nbaccel.zero_to_fp32(saved / "two/3-bf16", tmp_path)
    model = Net(is_whole=False)
    load_model(model, tmp_path / "model.safetensors")
    assert differing(dict(model.state_dict()), notes(saved / "two/3-bf16")["live"]) == []


@pytest.mark.parametrize("name", ["two/1-bf16", "two/2-fp32", "two/3-fp32"])
def test_frozen_parameters_can_be_left_out(saved, name):
    state = nbaccel.load_fp32_state_dict(saved / name, exclude_frozen_parameters=True)
    frozen = {"fixed.weight", "fixed.bias"}
    assert nbaccel.load_fp32_state_dict(saved / name).keys() - state.keys() == frozen
    assert state.keys() == notes(saved / name)["trained"]


@pytest.mark.parametrize("name", ALL)
def test_16_bit_weights_are_gathered_without_any_setting(saved, name):
    found = notes(saved / name)
    expected = {n: t for n, t in found["computed"].items() if n != "head.weight"}
    assert differing(read_all(saved / name / "sixteen"), expected) == []
    assert len(found["written"]) > 2, "an index, and files of at most 600 bytes"


def test_what_is_gathered_is_rank_0s_alone_and_what_fails_there_fails_everywhere(saved):
    for name in CASES:
        first, second = (notes(saved / "two" / name, rank) for rank in (0, 1))
        assert second["live"] == {}
        assert first["written"] == second["written"]
        assert first["refused"].startswith("ConfigError: ")
        assert "a-file is a file" in first["refused"]
        assert second["refused"].startswith("CheckpointFailed: save_16bit_weights(")
        assert "a-file is a file" in second["refused"]


@pytest.mark.parametrize("name", PARTITIONED)
def test_placeholders_are_named_and_refused_where_weights_are_saved(saved, name):
    found = notes(saved / name)
    assert {"words.weight", "head.weight", "fixed.bias"} <= set(found["placeholders"])
    assert found["in_state"] == found["placeholders"]
    assert "8 of the weights are ZeRO-3 placeholders (words.weight" in found["bad_save"]
    assert "nbaccel.save_16bit_weights(engine, folder)" in found["bad_save"]
