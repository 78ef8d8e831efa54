"""Files of torch.save that are mapped, and safetensors written as a stream."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nbaccel
from nbaccel.base.weight_files import SAFE_DTYPE_NAMES
from nbaccel.deepspeed.checkpoint_layout import Unknown, Weight, read_states
from nbaccel.deepspeed.local_shards import check_whole, placeholders
from nbaccel.errors import CheckpointFailed, ConfigError
from tests.isolation import isolated

# ------------------------------------------------------------------------- reading


def read_back(folder: Path, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor out of the file that a conversion has made of it."""
    nbaccel.zero_to_fp32(stage_0(folder / "in", {"x": tensor}), folder / "out")
    return load_file(folder / "out/model.safetensors")["x"]


@pytest.mark.parametrize("name", SAFE_DTYPE_NAMES.values())
def test_every_type_is_read_as_it_was_or_as_fp32(tmp_path, name):
    # One format has powers of two alone.
    numbers = [1, 2, 1, 4] if "e8m0" in name else range(4)
    tensor = torch.tensor([[*numbers]] * 3).to(getattr(torch, name))
    expected = tensor.float() if tensor.is_floating_point() else tensor
    found = read_back(tmp_path, tensor)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6).T,
        torch.rand(5).expand(3, 5),
        torch.rand(6, 6)[1:5:2, ::3],
        torch.rand(()),
        torch.rand(0, 3),
        torch.rand(7)[2:],
        torch.randn(3, 4, dtype=torch.bfloat16).T,
        torch.rand(2**20 + 5, 2),
    ],
    ids=["transposed", "expanded", "strided", "scalar", "empty", "offset", "bf16", "large"],
)
def test_a_tensor_is_read_in_the_order_of_its_shape(tmp_path, tensor):
    assert torch.equal(read_back(tmp_path, tensor), tensor.float())


def test_what_is_not_finite_or_negative_zero_keeps_its_bits(tmp_path):
    tensor = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40], dtype=torch.bfloat16)
    found = read_back(tmp_path, tensor)
    assert torch.equal(found.view(torch.int32), tensor.float().view(torch.int32))


class Odd:
    """A class that nobody else has."""


def test_objects_of_other_classes_are_left_alone_and_code_is_not_run(tmp_path):
    parameter = torch.nn.Parameter(torch.rand(2))
    content = {"odd": Odd(), "size": torch.Size([2, 3]), "set": {1}, "p": parameter}
    torch.save(content, tmp_path / "x.pt")
    states = read_states(tmp_path / "x.pt").states
    assert isinstance(states["odd"], Unknown)
    assert (states["size"], states["set"]) == ((2, 3), {1})
    assert torch.equal(states["p"], parameter)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "was-here"), "w"))

    torch.save({"evil": Evil()}, tmp_path / "x.pt")
    assert isinstance(read_states(tmp_path / "x.pt").states["evil"], Unknown)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    (tmp_path / "x.pt").write_text("hello")
    with pytest.raises(ConfigError, match=r"x.pt cannot be read, at a size of 5 bytes"):
        read_states(tmp_path / "x.pt")


# ------------------------------------------------------------------------- a model without ZeRO


def stage_0(folder: Path, module: dict[str, torch.Tensor], **more: object) -> Path:
    (folder / "step1").mkdir(parents=True)
    states = {"module": module, "buffer_names": [], "param_shapes": None, **more}
    torch.save(states, folder / "step1" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("step1")
    return folder


def test_fp32_weights_without_names_are_refused(tmp_path):
    optimizer = {"fp32_groups_flat": [torch.rand(4)]}
    folder = stage_0(tmp_path / "in", {"w": torch.ones(4).bfloat16()}, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"fp32 are in its optimizer \(fp32_groups_flat\)"):
        nbaccel.load_fp32_state_dict(folder)


# ------------------------------------------------------------------------- writing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def four_layers(folder: Path, value: float = 1.0) -> Path:
    return stage_0(folder, {f"layer{n}.weight": torch.full((250,), value) for n in range(4)})


def test_types_are_aligned_and_headers_whole(tmp_path):
    module = {"a": torch.tensor([True]), "b": torch.rand(3), "c": torch.arange(2)}
    module["ü"] = torch.rand(1)
    nbaccel.zero_to_fp32(stage_0(tmp_path / "in", module), tmp_path / "out")
    content = (tmp_path / "out/model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    offsets = {name: header[name]["data_offsets"][0] for name in module}
    assert offsets["c"] % 8 == offsets["b"] % 4 == offsets["ü"] % 4 == 0
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(loaded[name], module[name]) for name in module)


@pytest.mark.parametrize("size", ["0", "0GB", "lots"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    source = four_layers(tmp_path / "in")
    with pytest.raises(ConfigError, match=size):
        nbaccel.zero_to_fp32(source, tmp_path / "out", max_shard_size=size)
    assert names(tmp_path) == ["in"]


def test_an_output_that_cannot_be_written_is_told(tmp_path):
    source = four_layers(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"latest is a file: weights and their index need"):
        nbaccel.zero_to_fp32(source, source / "latest")
    with pytest.raises(CheckpointFailed, match=r"latest/out failed: .*Not a directory"):
        nbaccel.zero_to_fp32(source, source / "latest" / "out")


def test_too_small_a_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    source, usage = four_layers(tmp_path / "in"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3999))
    with pytest.raises(ConfigError, match=r"3\.9 KiB of weights.* has 3\.9 KiB free. Make room"):
        nbaccel.zero_to_fp32(source, tmp_path / "deep/out")
    assert names(tmp_path) == ["in"]


@isolated
def test_a_full_disk_leaves_what_was_there(tmp_path):
    """The system refuses files above a size, as a full disk would."""
    out = tmp_path / "out"
    nbaccel.zero_to_fp32(four_layers(tmp_path / "old", 7.0), out)
    before = (out / "model.safetensors").read_bytes()
    new = four_layers(tmp_path / "new")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointFailed, match=r"out failed: .*File too large.* are free. Remove"):
        nbaccel.zero_to_fp32(new, out)
    with pytest.raises(CheckpointFailed):
        nbaccel.zero_to_fp32(new, tmp_path / "deep" / "new-out")
    assert names(out) == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_what_was_there(tmp_path, monkeypatch, error):
    source, out = four_layers(tmp_path / "in"), tmp_path / "out"
    nbaccel.zero_to_fp32(source, out)
    (out / "config.json").touch()
    before = names(out), (out / "model.safetensors").stat().st_mtime_ns

    def chunks(weight):
        assert len(names(out)) == 4, "the folder that is filled and a lock are there"
        yield torch.zeros(2)
        raise error

    monkeypatch.setattr(Weight, "chunks", chunks)
    with pytest.raises(error):
        nbaccel.zero_to_fp32(source, out)
    assert (names(out), (out / "model.safetensors").stat().st_mtime_ns) == before


def test_a_death_between_two_renames_leaves_no_index_of_old_and_new_files(tmp_path, monkeypatch):
    out, old = tmp_path / "out", four_layers(tmp_path / "in")
    new = four_layers(tmp_path / "new", 2.0)
    nbaccel.zero_to_fp32(old, out, max_shard_size="2kB")
    replace, moved = Path.replace, []

    def dying(path, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        nbaccel.zero_to_fp32(new, out, max_shard_size="2kB")
    assert names(out) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


# ------------------------------------------------------------------------- placeholders


def test_placeholders_are_refused_with_how_to_get_whole_weights(tmp_path):
    assert placeholders({"scale": torch.ones(1), "w": torch.rand(3)}) == []
    assert placeholders({"a": torch.empty(0), "n": torch.empty(0, dtype=torch.long)}) == ["a"]
    assert placeholders({"a": torch.empty(0, 3), "step": 3}) == []
    words = r"save\('x'\): 1 of the weights are ZeRO-3 placeholders"
    with pytest.raises(ConfigError, match=words) as e:
        check_whole({"a": torch.empty(0)}, "save('x')")
    assert "fp32_state_dict(engine)" in str(e.value)
    check_whole({"a": torch.rand(1)}, "save('x')")
    for call in (nbaccel.fp32_state_dict, lambda it: nbaccel.save_16bit_weights(it, tmp_path)):
        with pytest.raises(ConfigError, match=r"A Linear is no engine of DeepSpeed"):
            call(torch.nn.Linear(1, 1))
    assert os.listdir(tmp_path) == []  # noqa: PTH208
