"""Weights in a folder of files."""

from __future__ import annotations

import json
import resource
import signal

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.offload_folder import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offload_index,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from nbaccel.errors import CheckpointDamaged, ConfigError
from tests.bigmodel.test_align_hooks import RecordingSource

FORMATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.uint16),
]


def numbers(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    return (torch.arange(15).reshape(3, 5)[: shape[0]] if shape else torch.tensor(3)).to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_format_comes_back(tmp_path, dtype):
    weights = {
        "matrix": numbers(dtype),
        "transposed": numbers(dtype).t(),
        "scalar": numbers(dtype, ()),
        "empty": torch.empty((0, 3), dtype=dtype),
    }
    offload_state_dict(tmp_path, weights)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(loader) == list(weights)
    for name, weight in weights.items():
        found = loader[name]
        assert (found.dtype, found.shape) == (weight.dtype, weight.shape), name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found, weight))), name
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["index.json", *(f"{name}.dat" for name in weights)]
    )


def test_parameters_and_conjugates_are_written_and_never_changed(tmp_path):
    index = {}
    parameter, conjugate = nn.Parameter(torch.randn(3)), torch.tensor([1 + 2j]).conj()
    assert offload_weight(parameter, "p", tmp_path, index) is index
    assert offload_weight(conjugate, "c", tmp_path) is None
    assert index == {"p": {"dtype": "float32", "shape": [3]}}
    assert torch.equal(load_offloaded_weight(tmp_path / "p.dat", index["p"]), parameter)
    info = {"dtype": "complex64", "shape": [1]}
    assert load_offloaded_weight(tmp_path / "c.dat", info).item() == 1 - 2j
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    before = (tmp_path / "w.dat").read_bytes()
    (tmp_path / "w.dat").chmod(0o444)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    changed = loader["w"]
    changed.fill_(7.0)
    assert (tmp_path / "w.dat").read_bytes() == before
    assert torch.equal(loader["w"], torch.ones(4))
    assert torch.equal(changed, torch.full((4,), 7.0))


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/x", "..\\x", "", "a\0b", 3])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "inside"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be the name of a weight"):
        offload_weight(torch.ones(1), name, folder)
    with pytest.raises(ConfigError, match="cannot be the name of a weight"):
        offload_state_dict(folder, {"good": torch.ones(1), name: torch.ones(1)})
    loader = OffloadedWeightsLoader(
        save_folder=folder, index={name: {"dtype": "float32", "shape": [1]}}
    )
    with pytest.raises(ConfigError, match="cannot be the name of a weight"):
        loader[name]
    for weight in (torch.empty(2, device="meta"), "text", torch.eye(2).to_sparse()):
        with pytest.raises(ConfigError, match="no plain numbers"):
            offload_state_dict(folder, {"w": weight})
    assert list(folder.iterdir()) == []


SHAPES = ([-1], [1.0], "1", [2**70], [0, 2**62, 2**62])


@pytest.mark.parametrize(
    "info",
    [
        *({"dtype": dtype, "shape": [1]} for dtype in ("float33", "quint8")),
        *({"dtype": "float32", "shape": shape} for shape in SHAPES),
        {"dtype": "float32"},
        {"shape": [1]},
        [],
        None,
        "float32",
    ],
    ids=str,
)
def test_entries_that_make_no_sense_are_refused(tmp_path, info):
    (tmp_path / "w.dat").write_bytes(b"\0" * 4)
    (tmp_path / "index.json").write_text(json.dumps({"w": info}))
    with pytest.raises(CheckpointDamaged, match=r"w\.dat"):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"w": ', "[" * 100_000, "\ud800"])
def test_an_index_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointDamaged, match=r"index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"index\.json"):
        save_offload_index({"w": {}}, tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointDamaged, match=r"index\.json cannot be read"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"gone\.dat cannot be read.*No such file"):
        load_offloaded_weight(tmp_path / "gone.dat", {"dtype": "int8", "shape": [1]})
    with pytest.raises(ConfigError, match="nothing to load weights from"):
        OffloadedWeightsLoader()
    with pytest.raises(ConfigError, match="Pass save_folder"):
        OffloadedWeightsLoader(index={"w": {"dtype": "int8", "shape": [1]}})["w"]
    with pytest.raises(KeyError):
        OffloadedWeightsLoader(state_dict={})["w"]


def test_weights_that_do_not_fit_on_the_disk_are_refused_before_any_is_written(
    tmp_path, monkeypatch
):
    weights = {"a": torch.ones(500), "b": torch.ones(500)}
    monkeypatch.setattr("nbaccel.base.weight_files.free_bytes", lambda _: 3000)
    with pytest.raises(ConfigError, match=r"3.9 KiB of weights.*2.9 KiB free. Make room"):
        offload_state_dict(tmp_path / "off", weights)
    assert not (tmp_path / "off").exists()
    offload_weight(weights["a"], "a", tmp_path)
    offload_state_dict(tmp_path, weights)  # the file that is replaced counts as room


def test_a_full_disk_leaves_the_old_files_whole(tmp_path):
    """A limit on the size of files stands for the disk: writing beyond it is an OSError, too."""
    old = {"small": torch.ones(10), "large": torch.ones(5000)}
    offload_state_dict(tmp_path, old)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match="File too large"):
            offload_state_dict(tmp_path, {"large": torch.zeros(5000)})
        with pytest.raises(OSError, match="File too large"):
            offload_weight(torch.zeros(5000), "large", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "large.dat", "small.dat"]
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[name], weight) for name, weight in old.items())


def test_memory_comes_before_files(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    loader = OffloadedWeightsLoader(state_dict={"b": torch.ones(1)}, save_folder=tmp_path)
    assert list(loader) == ["b", "a"]
    assert len(loader) == 2
    assert (loader["a"].item(), loader["b"].item()) == (0, 1)
    assert "a" in loader
    assert "c" not in loader


def test_weights_come_from_safetensors(tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    stored = {"inner.w": torch.randn(2, 3), "v": torch.ones(2, dtype=torch.bfloat16)}
    safetensors_torch.save_file(stored, path)
    index = {
        "w": {"safetensors_file": str(path), "weight_name": "inner.w", "dtype": "float16"},
        "v": {"safetensors_file": str(path)},
        "lost": {"safetensors_file": str(path), "weight_name": "lost"},
        "elsewhere": {"safetensors_file": str(tmp_path / "gone.safetensors")},
        "strange": {"safetensors_file": str(path), "weight_name": "v", "dtype": "float99"},
    }
    loader = OffloadedWeightsLoader(index=index)
    assert torch.equal(loader["w"], stored["inner.w"].half())
    assert torch.equal(loader["v"], stored["v"])
    assert OffloadedWeightsLoader(index=index, device="meta")["v"].is_meta
    for name in ("lost", "elsewhere", "strange"):
        with pytest.raises(CheckpointDamaged, match="safetensors"):
            loader[name]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointDamaged, match="cannot give the weight 'v'"):
        loader["v"]


def test_parts_of_a_map_are_maps_and_entries_of_submodules_are_found():
    whole = RecordingSource({"a.w": 1, "a.b": 2, "ab.w": 3})
    part = PrefixedDataset(whole, "a.")
    assert dict(part) == {"w": 1, "b": 2}
    assert len(part) == 2
    assert "w" in part
    assert "a.w" not in part
    assert part.get("x") is None
    PrefixedDataset(part, "").prefetch(["w"])
    part.release(["b"])
    assert (whole.take("prefetch"), whole.take("release")) == (["a.w"], ["a.b"])
    plain = PrefixedDataset({"a.w": 1}, "a.")
    plain.prefetch(["w"])
    plain.release(["w"])
    assert plain["w"] == 1
    state = {"a.w": 1, "ab.w": 2, "a.b.w": 3, "c": 4}
    assert extract_submodules_state_dict(state, ["a", "c"]) == {"a.w": 1, "a.b.w": 3, "c": 4}


def test_a_model_gets_its_weights_from_a_folder_unless_it_is_damaged(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    offload_state_dict(tmp_path, model.state_dict())
    load_offloaded_weights(other, load_offload_index(tmp_path), tmp_path)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad
    load_offloaded_weights(other, None, tmp_path / "nowhere")
    model = nn.Linear(3, 2, device="meta")
    offload_state_dict(tmp_path, nn.Linear(3, 2).state_dict())
    (tmp_path / "bias.dat").write_bytes(b"123")
    with pytest.raises(CheckpointDamaged, match=r"bias\.dat has 3 bytes"):
        load_offloaded_weights(model, load_offload_index(tmp_path), tmp_path)
    assert model.weight.is_meta
    with pytest.raises(ConfigError, match="8-bit weights"):
        load_offloaded_weights(model, {"SCB": {"dtype": "float32", "shape": [1]}}, tmp_path)
