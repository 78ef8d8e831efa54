"""What DeepSpeed keeps on disk between steps: loaded weights stay in it, and come home from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import (
    Accelerator,
    ConfigError,
    DeepSpeedPlugin,
    fp32_state_dict,
    notebook_launcher,
)
from tests.deepspeed import needs

pytestmark = [pytest.mark.slow, *needs.DISK, pytest.mark.filterwarnings("ignore")]

WIDTH = 1024  # DeepSpeed keeps smaller parameters in memory, whatever it is told


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def load_and_go_on(model: nn.Module, in_memory: int | None, folder: Path) -> dict[str, Any]:
    """Train, load whole weights from elsewhere, look at them, and train on.

    Beyond `in_memory` elements parameters are on disk, too; None keeps all of them in memory.
    """
    disk = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": disk}
    if in_memory is not None:
        zero["offload_param"] = {**disk, "max_in_cpu": in_memory}
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
    accelerator._run.strategy.load_model_state(engine, net(1).state_dict())
    loaded = {name: value.clone() for name, value in fp32_state_dict(engine).items()}
    accelerator.backward(engine(rows).square().mean())
    optimizer.step()
    return {"loaded": loaded, "files": len([*folder.rglob("*.swp")])}


@pytest.mark.parametrize("in_memory", [None, 10**9])
def test_loaded_weights_are_on_disk_and_the_next_step_begins_with_them(
    tmp_path: Path, in_memory: int | None
):
    model = net(0)
    found = notebook_launcher(load_and_go_on, (model, in_memory, tmp_path), num_processes=2)[0]
    assert found["files"] > 0
    expected = net(1).weight.detach()
    assert torch.equal(found["loaded"]["weight"], expected)
    moved = (model.weight.detach() - expected).abs().max().item()
    assert 0 < moved < 1e-3


def test_parameters_on_disk_take_no_loaded_weights(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"shape \(1024, 1024\) is on disk.*before `prepare`"):
        notebook_launcher(load_and_go_on, (net(0), 0, tmp_path), num_processes=2)
