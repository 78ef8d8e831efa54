"""`load_checkpoint_in_model`: what lands where, and that a refusal changes nothing."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from nbaccel.bigmodel.checkpoint_files import read_checkpoint
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.transfer.arena import named_tensors
from tests.bigmodel import families
from tests.isolation import isolated


class Net(nn.Module):
    """Tied weights, buffers of both kinds, a scalar, integers, an empty and an odd tensor."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.levels = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.norm(self.embed(words)))) * self.gain


def build(seed: int = 0, width: int = 8) -> Net:
    torch.manual_seed(seed)
    model = Net(width)
    for tensor in model.buffers():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor).abs())
    return model


def on_meta(width: int = 8) -> Net:
    with torch.device("meta"):
        return Net(width)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].device == tensor.device, name
        assert tensor.is_meta or torch.equal(found[name], tensor), name


def write(model: nn.Module, path: Path, **changes: Any) -> Path:
    """Save a state dict; of tied weights one name in safetensors, as `save_pretrained` does."""
    state = model.state_dict() | changes
    state = {name: value for name, value in state.items() if value is not None}
    if path.suffix == ".safetensors":
        if changes.get("head.weight") is None:
            state.pop("head.weight", None)
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Net, Path]:
    model = build()
    return model, write(model, tmp_path / request.param)


def without_positions(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "positions"}


# ------------------------------------------------------------------------------ what lands where


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": torch.device("cpu")}])
@pytest.mark.parametrize("make", [on_meta, lambda: build(1)], ids=["meta", "real"])
def test_every_tensor_has_the_values_of_the_file(saved, make, device_map):
    source, path = saved
    model = make()
    model.inner.requires_grad_(False)
    model.gain.mark = "kept"
    objects = dict(named_tensors(model))
    load_checkpoint_in_model(model, path, device_map)
    assert_same(without_positions(values(model)), without_positions(values(source)))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is objects[name], "an optimizer made before still has it"
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == (name != "levels" and not name.startswith("inner"))
    assert model.head.weight is model.embed.weight
    assert model.state_dict().keys() == source.state_dict().keys()
    assert "positions" not in model.state_dict()
    assert model.gain.mark == "kept"


@pytest.mark.parametrize("stored_name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_tied_weights_are_loaded_under_whichever_name_is_stored(tmp_path, stored_name, device_map):
    source = build()
    state = source.state_dict()
    state.pop({"embed.weight": "head.weight", "head.weight": "embed.weight"}[stored_name])
    save_file(state, tmp_path / "model.safetensors")
    for model in (on_meta(), build(1)):
        load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, source.embed.weight)


def test_weights_that_were_tied_only_when_they_were_saved_do_not_become_one(tmp_path):
    path = write(build(), tmp_path / "pytorch_model.bin")
    model = on_meta()
    model.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    load_checkpoint_in_model(model, path)
    assert torch.equal(model.head.weight, model.embed.weight)
    with torch.no_grad():
        model.head.weight.fill_(0)
    assert not (model.embed.weight == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "torch.float64"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("make", [on_meta, lambda: build(1)], ids=["meta", "real"])
def test_floating_point_weights_become_the_format_that_is_asked_for(saved, make, device_map, dtype):
    source, path = saved
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.split(".")[-1])
    model = make()
    objects = dict(model.named_parameters())
    load_checkpoint_in_model(model, path, device_map, dtype=dtype)
    for name, tensor in without_positions(values(source)).items():
        found = dict(named_tensors(model))[name]
        expected = tensor.to(wanted) if tensor.is_floating_point() else tensor
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())


def test_modules_kept_in_float32_are(saved):
    _, path = saved
    model = on_meta()
    load_checkpoint_in_model(
        model, path, {"": "cpu"}, dtype=torch.float16, keep_in_fp32_modules=["norm"]
    )
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32
    assert model.inner[0].weight.dtype == torch.float16
    other = on_meta()
    load_checkpoint_in_model(other, path, dtype="bfloat16", keep_in_fp32_modules=["norm"])
    assert other.norm.weight.dtype == torch.bfloat16


def test_a_checkpoint_in_bf16_or_fp8_fills_a_float32_model(tmp_path):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float64):
        source = build().to(dtype)
        path = write(source, tmp_path / "model.safetensors")
        for model in (on_meta(), build(1)):
            load_checkpoint_in_model(model, path)
            assert model.embed.weight.dtype == torch.float32
            assert torch.equal(model.embed.weight, source.embed.weight.float())


@pytest.mark.filterwarnings("ignore")
def test_wrapped_and_compiled_models_are_filled(saved):
    source, path = saved
    expected = without_positions(values(source))

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="eager")

    load_checkpoint_in_model(compiled(on_meta()), path, strict=True)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel = nn.parallel.DistributedDataParallel
    try:
        for wrap in (compiled, parallel, lambda model: parallel(compiled(model))):
            inner = build(1)
            load_checkpoint_in_model(wrap(inner), path, strict=True)
            assert_same(without_positions(values(inner)), expected)
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------ the file afterwards


@pytest.mark.parametrize("fate", ["deleted", "replaced", "renamed", "saved over"])
def test_what_becomes_of_the_file_later_does_not_matter(saved, fate):
    source, path = saved
    model = on_meta()
    load_checkpoint_in_model(model, path)
    if fate == "deleted":
        path.unlink()
    elif fate == "renamed":
        path.rename(path.with_name("elsewhere"))
    else:  # as `save_pretrained` and `Accelerator.save_model` write: a new file, then a rename
        other = model if fate == "saved over" else build(5)
        write(other, path.with_name(f"new{path.suffix}")).replace(path)
    assert_same(without_positions(values(model)), without_positions(values(source)))


@isolated(timeout_s=60)
def test_a_model_can_be_saved_in_place_over_the_file_it_was_loaded_from(tmp_path):
    """As a loop does that keeps its best weights under one name."""
    source = nn.Linear(512, 512, bias=False)
    expected = source.weight.detach().clone()
    for name, save in [("m.safetensors", save_file), ("m.bin", torch.save)]:
        path = tmp_path / name
        save(source.state_dict(), path)
        for device_map in (None, {"": "cpu"}):
            model = nn.Linear(512, 512, bias=False, device="meta")
            load_checkpoint_in_model(model, path, device_map)
            save(model.state_dict(), path)
            assert torch.equal(model.weight, expected)


# ------------------------------------------------------------------------------ refusals


def refused(model: nn.Module, *args: Any, said: Any = (), **options: Any) -> str:
    """What a load is refused with, which has these parts; the model is as it was."""
    before, objects = values(model), dict(named_tensors(model))
    with pytest.raises(ConfigError) as caught:
        load_checkpoint_in_model(model, *args, **options)
    assert_same(values(model), before)
    assert all(tensor is objects[name] for name, tensor in named_tensors(model))
    assert all(part in str(caught.value) for part in said), caught.value
    return str(caught.value)


@pytest.mark.parametrize("make", [on_meta, build], ids=["meta", "real"])
def test_every_weight_of_another_shape_is_listed(saved, make):
    _, path = saved
    text = refused(make(width=9), path)
    for name, ours, theirs in [
        ("embed.weight", [11, 9], [11, 8]),
        ("norm.running_mean", [9], [8]),
        ("inner.1.bias", [9], [8]),
    ]:
        assert f"{name} has shape {ours} in the model and {theirs} in {path.name}" in text


def test_weights_without_a_value_and_values_without_a_weight_are_told_or_refused(tmp_path, caplog):
    changes = {"inner.0.bias": None, "gain": None, "extra": torch.ones(2)}
    path = write(build(), tmp_path / "model.safetensors", **changes)
    refused(on_meta(), path, said=("2 weights are not in the checkpoint", "gain", "inner.0.bias"))
    model = build(1)
    kept = model.inner[0].bias.detach().clone()
    with caplog.at_level(logging.WARNING, "nbaccel"):
        load_checkpoint_in_model(model, path)
    assert torch.equal(model.inner[0].bias, kept)
    assert "inner.0.bias" in caplog.text
    assert "extra" in caplog.text
    said = ("strict=True", "1 tensors of it are not in the model")
    refused(build(1), path, strict=True, said=said)
    wrong = torch.ones(5, dtype=torch.complex64)
    path = write(build(), tmp_path / "model.safetensors", **{"inner.0.bias": wrong})
    for model in (on_meta(), build(1)):
        refused(model, path, said=["inner.0.bias"])


@pytest.mark.parametrize("make", [on_meta, build])
def test_a_file_of_which_no_name_fits_is_refused_with_what_would_fit(tmp_path, make):
    path = tmp_path / "model.safetensors"
    for prefix in ("module.", "_orig_mod.", "model."):
        save_file({prefix + key: v.clone() for key, v in build().state_dict().items()}, path)
        told = [refused(make(), path)]
        assert f"Without {prefix!r} in the file's names" in told[0]
        if prefix != "_orig_mod.":
            write(build(), path)
            told.append(refused(nn.ModuleDict({prefix.removesuffix("."): make()}), path))
            assert f"With {prefix!r} before the file's names they fit" in told[1]
        for text in told:
            for part in ("none of the", f"{prefix}gain", "the model has "):
                assert part in text


@pytest.mark.parametrize("device", ["cuda:7", 7, "nonsense", -1, 3.5, [0], "xla:99"])
def test_a_device_that_is_not_there_is_refused(saved, device):
    _, path = saved
    if device == 7 and torch.accelerator.device_count() > 7:
        pytest.skip("this machine has it")
    for model in (on_meta(), build(1)):
        device_map = {"inner": device, "norm": "cuda:71", "": "cpu"}
        refused(model, path, device_map, said=("inner.0", repr(device), "norm.", "cuda:71"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "auto"}, ["load_checkpoint_and_dispatch"]),
        ({"device_map": {"": "disk"}}, ["offload_folder"]),
        ({"offload_8bit_bnb": True}, ["bitsandbytes"]),
        (
            {"device_map": {"inner.0": "cpu", "embed": "cpu", "norm": None}},
            [f"{name} has no device" for name in ("inner.1.weight", "norm.bias", "gain")],
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(saved, options, said):
    _, path = saved
    for model in (on_meta(), build(1)):
        assert "inner.0" not in refused(model, path, said=said, **options)


def test_a_file_that_shrinks_between_its_header_and_its_weights_is_refused(tmp_path, monkeypatch):
    from nbaccel.bigmodel import checkpoint_loading

    path = write(build(), tmp_path / "model.safetensors")
    read = checkpoint_loading.read_checkpoint

    def read_and_cut(checkpoint: Path) -> Any:
        content = read(checkpoint)
        os.truncate(path, 900)
        return content

    monkeypatch.setattr(checkpoint_loading, "read_checkpoint", read_and_cut)
    before = values(model := build(1))
    with pytest.raises(CheckpointDamaged, match="has become shorter"):
        load_checkpoint_in_model(model, path)
    assert_same(values(model), before)


# ------------------------------------------------------------------------------ the bar


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_bar_counts_every_byte_that_is_read_and_a_short_load_shows_none(
    saved, capfd, monkeypatch, device_map
):
    _, path = saved
    threads = set(threading.enumerate())
    load_checkpoint_in_model(on_meta(), path, device_map)
    load_checkpoint_in_model(build(1), path, device_map)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("nbaccel.bigmodel.checkpoint_loading._BAR_DELAY_S", 0)
    seen = []

    class Watched(tqdm):
        monitor_interval = 0

        def close(self) -> None:
            if not self.disable and seen[-1:] != [(self.n, self.total)]:
                seen.append((self.n, self.total))
            super().close()

    monkeypatch.setattr("nbaccel.bigmodel.checkpoint_loading.progress_bar", Watched)
    for options in ({}, {"dtype": torch.bfloat16}):
        seen.clear()
        load_checkpoint_in_model(build(1), path, device_map, **options)
        assert seen
        assert seen[0][0] == seen[0][1] > 0
    assert "loading weights" in capfd.readouterr().err
    assert set(threading.enumerate()) == threads


# ------------------------------------------------------------------------------ peers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved_as", ["10GB", "20KB", "pickle"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_models_of_transformers_are_loaded_as_saved_and_as_by_accelerate(
    tmp_path, family, saved_as
):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    source = families.build(family)
    is_safe = saved_as != "pickle"
    if is_safe:
        source.save_pretrained(tmp_path, max_shard_size=saved_as)
    else:
        torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        empty = families.build(family)
    empty.tie_weights()
    for model in (empty, families.build(family)):
        load_checkpoint_in_model(model, tmp_path)
        for name, tensor in source.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    tied = {name for names in accelerate.utils.find_tied_parameters(source) for name in names}
    for device_map, dtype in [(None, None), ({"": "cpu"}, None), ({"": "cpu"}, torch.bfloat16)]:
        torch.manual_seed(1)
        ours, theirs = families.build(family), families.build(family)
        load_checkpoint_in_model(ours, tmp_path, device_map, dtype=dtype)
        accelerate.load_checkpoint_in_model(theirs, tmp_path, device_map, dtype=dtype)
        for name in read_checkpoint(tmp_path):
            found, tensor = ours.state_dict()[name], theirs.state_dict()[name]
            if device_map and is_safe and name in tied:
                # Accelerate ties such a model anew, to the weight that the file does not name.
                tensor = source.state_dict()[name].to(found.dtype)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name
