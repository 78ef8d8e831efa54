"""What DeepSpeed keeps on disk between steps: loaded weights stay in it, and come home from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, fp32_state_dict, notebook_launcher
from tests.deepspeed import needs

pytestmark = [pytest.mark.slow, *needs.DISK, pytest.mark.filterwarnings("ignore")]

WIDTH = 1024  # DeepSpeed keeps smaller parameters in memory, whatever it is told
PLACES = ("none", "nvme")
"""Of the parameters; the optimizer is on disk."""


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def load_and_go_on(model: nn.Module, start: Path, place: str, folder: Path) -> dict[str, Any]:
    """Train, load whole weights from elsewhere, look at them, and train on."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": disk,
    }
    if place == "nvme":
        zero["offload_param"] = dict(disk)
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True)
    engine, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    )
    rows = torch.ones(2, WIDTH)
    for _ in range(2):
        accelerator.backward(engine(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator._run.strategy.load_model_state(engine, torch.load(start, weights_only=True))
    loaded = {name: value.clone() for name, value in fp32_state_dict(engine).items()}
    accelerator.backward(engine(rows).square().mean())
    optimizer.step()
    return {"loaded": loaded, "files": len([*folder.rglob("*.swp")])}


def all_places(models: dict[str, nn.Module], start: Path, folder: Path) -> dict[str, Any]:
    return {p: load_and_go_on(models[p], start, p, folder / p) for p in PLACES}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    folder = tmp_path_factory.mktemp("disk")
    start = folder / "weights.pt"
    torch.save(net(1).state_dict(), start)
    models = {place: net(0) for place in PLACES}
    results = notebook_launcher(all_places, (models, start, folder), num_processes=2, timeout=240)
    return results[0], models


@pytest.mark.parametrize("place", PLACES)
def test_loaded_weights_are_on_disk_and_the_next_step_begins_with_them(ran: Any, place: str):
    found, models = ran[0][place], ran[1]
    assert found["files"] > 0
    expected = net(1).weight.detach()
    assert torch.equal(found["loaded"]["weight"], expected)
    moved = (models[place].weight.detach() - expected).abs().max().item()
    assert 0 < moved < 1e-3
