"""`save_state(exclude_frozen_parameters=True)`: frozen weights are in no file, and not lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from nbaccel import Accelerator, FullyShardedDataParallelPlugin
from nbaccel.errors import CheckpointDamaged, ConfigError
from tests.accelerator.loops import together
from tests.strategies.needs import SHARDING

TRAINED = {"adapter.weight", "adapter.bias", "head.weight"}
FROZEN = {"base.weight", "base.bias"}


class Adapted(nn.Module):
    """A frozen base, what is trained beside it, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        torch.manual_seed(seed)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.base(x) + self.adapter(x))


def start(accelerator: Accelerator, seed: int) -> tuple[Any, Any]:
    model = Adapted(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    return accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.1))


def steps(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def goes_on(folder: Path, make: Callable[[], Accelerator] | None = None) -> Callable[..., Any]:
    """Save, go on; load into a model whose trained weights are others, and go on from there."""

    def body(accelerator: Accelerator) -> tuple[list[float], list[float]]:
        accelerator = make() if make else accelerator
        model, optimizer = start(accelerator, 0)
        steps(accelerator, model, optimizer)
        accelerator.save_state(folder, exclude_frozen_parameters=True)
        expected = steps(accelerator, model, optimizer)
        accelerator.free_memory()
        other, stepper = start(accelerator, 1)
        accelerator.load_state(folder)
        return expected, steps(accelerator, other, stepper)

    return body


def test_in_one_process(tmp_path: Path) -> None:
    expected, found = goes_on(tmp_path / "state")(Accelerator(cpu=True))
    assert found == expected
    assert load_file(tmp_path / "state" / "model.safetensors").keys() == TRAINED | {"seen"}


@pytest.mark.slow
@SHARDING
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_sharded_by_torch(tmp_path: Path, kind: str) -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    for expected, found in together(goes_on(tmp_path / "state"), fsdp_plugin=plugin):
        assert found == expected
    if kind == "FULL_STATE_DICT":
        names = set(load_file(tmp_path / "state" / "model.safetensors"))
    else:
        reader = FileSystemReader(tmp_path / "state" / "pytorch_model_fsdp_0")
        entries = reader.read_metadata().state_dict_metadata
        names = {key.removeprefix("model.") for key in entries if key.startswith("model.")}
    assert names == TRAINED | {"seen"}


def saved(folder: Path, model: nn.Module, **options: Any) -> Path:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return accelerator.save_state(folder, **options)


def load(folder: Path, model: nn.Module, **options: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.load_state(folder, **options)


def test_a_model_that_trains_them_now_or_another_one_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "state", Adapted(), exclude_frozen_parameters=True)
    model, wider, without = Adapted(1), Adapted(), Adapted()
    model.base.requires_grad_(True)
    wider.more = nn.Linear(2, 2).requires_grad_(False)
    without.base = nn.Identity()
    before = model.adapter.weight.clone()
    with pytest.raises(ConfigError, match=r"no values for .* now trains .*: base\.bias, "):
        load(folder, model)
    with pytest.raises(ConfigError, match=r"it has no more\.weight, more\.bias"):
        load(folder, wider)
    with pytest.raises(ConfigError, match=r"the Adapted now .* does not have: base\.bias"):
        load(folder, without)
    assert torch.equal(model.adapter.weight, before)
    load(folder, model, strict=False)
    assert torch.equal(model.adapter.weight, Adapted().adapter.weight)


def test_nothing_is_left_out_unasked_and_the_names_are_checked_as_other_files_are(
    tmp_path: Path,
) -> None:
    everything = TRAINED | FROZEN | {"seen"}
    assert load_file(saved(tmp_path / "a", Adapted()) / "model.safetensors").keys() == everything
    trained = Adapted().requires_grad_(True)
    folder = saved(tmp_path / "b", trained, exclude_frozen_parameters=True)
    assert load_file(folder / "model.safetensors").keys() == everything
    assert not (folder / "nbaccel_left_out.json").exists()
    folder = saved(tmp_path / "state", Adapted(), exclude_frozen_parameters=True)
    path = folder / "nbaccel_left_out.json"
    assert json.loads(path.read_text()) == {
        "frozen_parameters_left_out": {"0": ["base.bias", "base.weight"]}
    }
    recorded = json.loads((folder / "nbaccel_manifest.json").read_text())["files"]
    assert "nbaccel_left_out.json" in recorded
    path.write_text(path.read_text()[:-9])
    with pytest.raises(CheckpointDamaged, match=r"nbaccel_left_out\.json is truncated"):
        load(folder, Adapted())
    path.unlink()
    with pytest.raises(ConfigError, match=r"it has no base\.weight, base\.bias"):
        load(folder, Adapted())


def test_tied_and_compiled_parameters_go_by_all_their_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
        model["a"].requires_grad_(False)
        model["b"].weight = model["a"].weight
        model["c"] = torch.compile(model["c"], backend="eager")
        return model

    folder = saved(tmp_path / "state", tied(), exclude_frozen_parameters=True)
    names = {name.replace("_orig_mod.", "") for name in load_file(folder / "model.safetensors")}
    assert names == {"b.bias", "c.weight", "c.bias"}
    load(folder, tied())
