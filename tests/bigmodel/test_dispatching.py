"""Models that run from several tiers: loaded by a map, dispatched, offloaded as a whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nbaccel import (
    Accelerator,
    ConfigError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from nbaccel.bigmodel.checkpoint_files import StoredWeights, WeightFiles, read_checkpoint
from nbaccel.errors import UnsafeMoment
from nbaccel.hooks import remove_hook_from_submodules
from tests.bigmodel.families import FAMILIES, build, inputs


class Tower(nn.Module):
    """Layers, a buffer that is saved and one that is not, and a tie."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.head(self.norm(hidden) * self.scale)


TOKENS = torch.arange(10)
MIXED = {
    "embed": "cpu",
    "layers.0": "cpu",
    "layers.1": "disk",
    "layers.2": "disk",
    "layers.3": "cpu",
    "norm": "disk",
    "scale": "cpu",
    "head": "cpu",
}


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(0)
    tower = Tower()
    tower(TOKENS)  # running statistics that are not those of a new model
    return tower.eval()


@pytest.fixture
def checkpoint(tower: Tower, tmp_path: Path) -> Path:
    state = {name: tensor for name, tensor in tower.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty() -> Tower:
    with init_empty_weights():
        return Tower().eval()


def on_meta(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.named_parameters() if tensor.is_meta}


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, MIXED])
def test_a_model_gives_the_same_numbers_from_any_tier(tower, checkpoint, device_map, prefetch):
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map=device_map, prefetch=prefetch
    )
    assert model.hf_device_map == device_map
    disk_names = on_meta(model)
    assert bool(disk_names) == ("disk" in device_map.values())
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), tower(TOKENS))
            assert on_meta(model) == disk_names, "what came for the pass went after it"
    reading = [thread.name for thread in threading.enumerate() if "read-ahead" in thread.name]
    assert not reading or prefetch


@pytest.mark.parametrize("words", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_is_made_of_a_word_and_budgets(tower, checkpoint, words):
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map=words, max_memory={"cpu": 4500}
    )
    assert {*model.hf_device_map.values()} == {"cpu", "disk"}
    with torch.no_grad():
        assert torch.equal(model(TOKENS), tower(TOKENS))


def test_a_word_that_is_no_map_is_refused_before_anything_is_loaded(checkpoint):
    model = empty()
    with pytest.raises(ConfigError, match=r"device_map='fastest' is no way.*'balanced_low_0'"):
        load_checkpoint_and_dispatch(model, checkpoint, device_map="fastest")
    with pytest.raises(ConfigError, match=r"layers\.3\.weight"):
        load_checkpoint_and_dispatch(
            model, checkpoint, device_map={"embed": "cpu", "head": "cpu", "norm": "cpu"}
        )
    assert len(on_meta(model)) == len(dict(model.named_parameters()))


def test_a_model_is_dispatched_later_from_an_index_or_written_to_a_folder(
    tower, checkpoint, tmp_path
):
    folder = tmp_path / "offload"
    model = empty()
    with pytest.raises(ConfigError, match="no offload_folder was given"):
        load_checkpoint_in_model(model, checkpoint, device_map=MIXED)
    load_checkpoint_in_model(model, checkpoint, device_map=MIXED, offload_folder=folder)
    assert [path.name for path in folder.iterdir()] == ["index.json"], "no second copy"
    model = dispatch_model(model, MIXED, offload_dir=folder)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), tower(TOKENS))
    with torch.no_grad():
        expected = tower(TOKENS)
        with pytest.raises(ConfigError, match=r"keeps layers\.1, layers\.2, norm on disk"):
            dispatch_model(tower, MIXED)
        model = dispatch_model(tower, MIXED, offload_dir=tmp_path / "own")
        assert (tmp_path / "own" / "layers.1.weight.dat").is_file()
        assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("offload_buffers", [True, False])
def test_whole_models_are_offloaded_to_the_host_or_the_disk(tower, tmp_path, offload_buffers):
    with torch.no_grad():
        expected = tower(TOKENS)
        state = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
        for offload in (
            lambda model: cpu_offload(model, offload_buffers=offload_buffers),
            lambda model: disk_offload(model, tmp_path, offload_buffers=offload_buffers),
        ):
            model = Tower().eval()
            model.load_state_dict(state)
            model = offload(model)
            assert len(on_meta(model)) == len(dict(model.named_parameters()))
            assert torch.equal(model(TOKENS), expected)
            assert torch.equal(model(TOKENS), expected)
            remove_hook_from_submodules(model)
            assert not on_meta(model)
            assert torch.equal(model(TOKENS), expected)


# ------------------------------------------------------------------------------ refusals
def test_a_model_with_weights_elsewhere_is_not_moved_not_trained_and_saved_whole(
    checkpoint, tower, tmp_path
):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map=MIXED)
    with pytest.raises(UnsafeMoment, match=r"cannot move the model: \d+ of its weights"):
        model.to("cpu")
    whole = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map={"": "cpu"}, force_hooks=True
    )
    with pytest.warns(UserWarning, match="was placed by a device_map"):
        whole.to("cpu")
    with pytest.raises(ConfigError, match=r"gradient of 'norm\.weight'.*would be lost"):
        model(TOKENS).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"kept in host memory or on disk.*fsdp_plugin"):
        Accelerator(cpu=True).prepare(model, optimizer)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    with torch.no_grad():
        assert prepared(TOKENS).shape == (10, 10)
    accelerator.save_model(prepared, tmp_path / "saved")
    loaded = empty()
    load_checkpoint_in_model(loaded, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), tower(TOKENS))


# ------------------------------------------------------------------------------ reading ahead


def test_a_read_that_fails_is_an_error_where_the_weight_is_needed(checkpoint, monkeypatch):
    files, stored = WeightFiles(), read_checkpoint(checkpoint)
    weights = StoredWeights(files, stored)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "bring_in", fail)
    weights.prefetch(["norm.weight"])
    with pytest.raises(OSError, match="Input/output error"):
        weights["norm.weight"]


# ------------------------------------------------------------------------------ beside Accelerate
# Of Accelerate, where transformers 4 ties T5's embeddings.
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")
@pytest.mark.parametrize("share", [2.0, 0.7, 0.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_give_accelerates_numbers(name, share, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    import nbaccel

    torch.manual_seed(0)
    whole = build(name).eval()
    whole.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    budget = {"cpu": int(share * sum(tensor.nbytes for tensor in whole.parameters()))}
    logits = []
    for library in (nbaccel, accelerate):
        with library.init_empty_weights():
            model = build(name)
        model.tie_weights()
        try:
            model = library.load_checkpoint_and_dispatch(
                model,
                str(tmp_path / "model"),
                device_map="auto",
                max_memory=budget,
                no_split_module_classes=model._no_split_modules,
                offload_folder=str(tmp_path / library.__name__),
            ).eval()
        except Exception as error:
            # Accelerate asks safetensors for the device "disk" where all is to stay there.
            assert library is accelerate
            assert "disk" in str(error)  # noqa: PT017
            continue
        with torch.no_grad():
            logits.append(model(**inputs(name)).logits)
    with torch.no_grad():
        expected = whole(**inputs(name)).logits
    assert all(torch.equal(found, expected) for found in logits)


# ------------------------------------------------------------------------------ adapters, buffers
class Adapted(nn.Module):
    """A low-rank adapter around a layer, where the layer's weight is, as peft makes it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        place = {"bias": False, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, **place)
        self.lora_B = nn.Linear(rank, base.out_features, **place)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base_layer(values) + self.lora_B(self.lora_A(values))


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_made_on_meta_is_named_before_it_computes(tmp_path, whole):
    torch.manual_seed(0)
    model = Tower().eval()
    if whole:
        disk_offload(model, tmp_path)
    else:
        dispatch_model(model, MIXED, offload_dir=tmp_path)
    expected = model(TOKENS)
    model.requires_grad_(False)
    for number, layer in enumerate(model.layers):
        model.layers[number] = Adapted(layer)
    with pytest.raises(ConfigError, match=r"on meta .*layers.\d.lora_A.weight.* before the model"):
        model(TOKENS)
    # As the message says.
    for layer in model.layers:
        for part in (layer.lora_A, layer.lora_B):
            if part.weight.is_meta:
                part.to_empty(device="cpu")
            nn.init.zeros_(part.weight)
    torch.testing.assert_close(model(TOKENS), expected)


@pytest.mark.parametrize("kind", ["one", "mixed"])
def test_a_buffer_that_no_file_has_is_named(tmp_path, caplog, kind):
    save_file({k: v.clone() for k, v in Tower().state_dict().items() if k != "head.weight"},
              tmp_path / "model.safetensors")  # fmt: skip
    with init_empty_weights(include_buffers=True):
        model = Tower().eval()
    words = {"one": r"1 tensors of Tower are on meta .*: scale", "mixed": "'scale' is on meta"}
    with pytest.raises(ConfigError, match=words[kind]):
        load_checkpoint_and_dispatch(
            model,
            tmp_path / "model.safetensors",
            device_map={"one": {"": "cpu"}, "mixed": MIXED}[kind],
            offload_folder=tmp_path / "off",
        )
    assert "1 buffers of Tower are on meta and in no checkpoint" in caplog.text
