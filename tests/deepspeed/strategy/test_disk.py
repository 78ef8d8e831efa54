"""Engines that swap to a disk: what comes home, what a checkpoint has, and what is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, Pool, fp32_state_dict, notebook_launcher
from nbaccel.deepspeed import local_shards
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.errors import ConfigError, WorkerDied
from tests.deepspeed import needs
from tests.deepspeed.programs import refusal, told_by
from tests.deepspeed.strategy.test_training import distance

pytestmark = pytest.mark.slow

PROGRAM = "tests.deepspeed.strategy.test_disk"
ON_DISK = {"nothing": (), "state": ("optimizer",), "all": ("optimizer", "param")}


def net() -> nn.Module:
    """Wide enough for DeepSpeed to swap: small groups stay in memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))


def swapped_to(folder: str, parts: Sequence[str] = ("optimizer", "param")) -> dict[str, Any]:
    """A configuration with these parts on disk."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 100_000,
    }
    for part in parts:
        zero[f"offload_{part}"] = {"device": "nvme", "nvme_path": folder}
    return {"zero_optimization": zero}


def train(models: dict[str, nn.Module], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, what in ON_DISK.items():
        plugin = DeepSpeedPlugin(hf_ds_config=swapped_to(str(folder / "swap"), what))
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", cpu=True)
        model = models[name]
        engine, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        torch.manual_seed(accelerator.process_index)
        values, labels = torch.randn(16, 64), torch.randint(0, 10, (16,))
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(engine(values), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        found[name] = losses
        if name == "all":
            found["gathered"] = {
                k: v.clone() for k, v in accelerator.get_state_dict(engine).items()
            }
    files = [path.relative_to(folder) for path in (folder / "swap").rglob("*.swp")]
    found["folders"] = sorted({str(path.parent) for path in files})
    return found


@needs.on_disk
def test_it_trains_as_in_memory_and_weights_come_home(tmp_path):
    models = {name: net() for name in ON_DISK}
    found = notebook_launcher(train, (models, tmp_path), num_processes=2, timeout=240)[0]
    assert found["state"] == found["all"]
    # DeepSpeed steps on the CPU with an Adam of its own, which rounds otherwise than torch's.
    assert found["state"] == pytest.approx(found["nothing"], abs=1e-4)
    tops = {name.partition("/zero_stage_3")[0] for name in found["folders"]}
    assert tops == {"swap", "swap/engine_1"}, "each engine has a folder of its own"
    home = models["all"].state_dict()
    assert distance(models["state"].state_dict(), home) == 0
    rounded = {name: value.bfloat16() for name, value in home.items()}
    assert distance(found["gathered"], rounded) == 0
    assert distance(models["nothing"].state_dict(), home) < 1e-3
    assert not list((tmp_path / "swap").rglob("*.swp")), "none is left"


def train_on(folder: Path, is_killed: bool) -> int:
    """A step of two processes, of which the second may die; the number of files meanwhile."""
    plugin = DeepSpeedPlugin(hf_ds_config=swapped_to(str(folder)))
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", cpu=True)
    model = net()
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(engine(torch.randn(4, 64)).sum())
    optimizer.step()
    swapped = len(list(folder.rglob("*.swp")))
    accelerator.wait_for_everyone()
    if is_killed and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
    return swapped


@needs.on_disk
def test_a_pool_leaves_no_file(tmp_path):
    kept = tmp_path / "zero_stage_3" / "of the user"
    kept.mkdir(parents=True)
    with Pool(num_processes=2) as pool:
        assert min(pool.launch(train_on, (tmp_path, False)).values) > 0
        with pytest.raises(WorkerDied):
            pool.launch(train_on, (tmp_path, True))
        assert not list(tmp_path.rglob("*.swp"))
    assert [*kept.parent.iterdir()] == [kept]


# ----------------------------------------------------------------------------- claims alone
def settings(path: Path, device: str = "nvme") -> ZeroConfig:
    section = {"device": device, **({"nvme_path": str(path)} if device == "nvme" else {})}
    return ZeroConfig(stage=3, offload_param=section)


def test_a_claim_leaves_what_others_have_in_the_folder(tmp_path):
    given = settings(tmp_path)
    found, claimed = local_shards.claim(given, rank=0)
    assert found == given
    for rank in (0, 1):
        place = tmp_path / "zero_stage_3" / "optimizer" / f"rank{rank}"
        place.mkdir(parents=True)
        (place / "1.tensor.swp").touch()
    (tmp_path / "mine.txt").touch()
    second, other = local_shards.claim(given, rank=0)
    assert second.offload_param.nvme_path == str(tmp_path / "engine_1")
    claimed.release()
    claimed.release()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "1.tensor.swp",
        "mine.txt",
    ]
    local_shards.leave()
    again, third = local_shards.claim(given, rank=1)
    assert again == given
    third.release()
    other.release()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.txt"]
    given = settings(tmp_path, "cpu")
    found, claimed = local_shards.claim(given, rank=0)
    assert found == given
    assert not claimed.folders
    claimed.release()


def test_a_forked_process_leaves_the_files_of_its_parent(tmp_path):
    _, claimed = local_shards.claim(settings(tmp_path), rank=0)
    mine = tmp_path / "zero_stage_3" / "bfloat16params" / "rank0" / "0.swp"
    mine.parent.mkdir(parents=True)
    mine.touch()
    pid = os.fork()
    if pid == 0:
        try:
            local_shards.leave()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert mine.exists()
    claimed.release()
    assert list(tmp_path.iterdir()) == []


@needs.on_disk
@pytest.mark.parametrize(
    ("layers", "refused", "claims"),
    [("Linear", "", 1), ("Expert", "transformer_moe_cls_names='Expert'", 0)],
)
def test_no_files_stay_when_python_exits_with_an_engine(tmp_path, layers, refused, claims):
    told = told_by(PROGRAM, str(tmp_path), layers, timeout_s=800)
    assert refused in told["refused"]
    assert (told["refused"] == "", told["claims"]) == (refused == "", claims)
    assert not list(tmp_path.rglob("*.swp"))
    assert refused or list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- loading
WIDTH = 1024  # DeepSpeed keeps smaller parameters in memory, whatever it is told


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def load_and_go_on(model: nn.Module, in_memory: int, folder: Path) -> dict[str, Any]:
    """Train, load whole weights from elsewhere, look at them, and train on.

    Beyond `in_memory` elements parameters are on disk, too.
    """
    disk = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": disk,
        "offload_param": {**disk, "max_in_cpu": in_memory},
    }
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
    accelerator._run.strategy.load_model_state(engine, layer(1).state_dict())
    loaded = {name: value.clone() for name, value in fp32_state_dict(engine).items()}
    accelerator.backward(engine(rows).square().mean())
    optimizer.step()
    return {"loaded": loaded, "files": len([*folder.rglob("*.swp")])}


@needs.on_disk
def test_loaded_weights_are_on_disk_and_the_next_step_begins_with_them(tmp_path: Path):
    model = layer(0)
    found = notebook_launcher(load_and_go_on, (model, 10**9, tmp_path), num_processes=2)[0]
    assert found["files"] > 0
    expected = layer(1).weight.detach()
    assert torch.equal(found["loaded"]["weight"], expected)
    moved = (model.weight.detach() - expected).abs().max().item()
    assert 0 < moved < 1e-3


@needs.on_disk
def test_parameters_on_disk_take_no_loaded_weights(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"shape \(1024, 1024\) is on disk.*before `prepare`"):
        notebook_launcher(load_and_go_on, (layer(0), 0, tmp_path), num_processes=2)


# ----------------------------------------------------------------------------- the program
def main(folder: str, layers: str) -> None:
    """A process without a launcher that prepares an engine with parts on disk, and just ends."""
    plugin = DeepSpeedPlugin(hf_ds_config=swapped_to(folder), transformer_moe_cls_names=layers)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", cpu=True)
    model = net()
    refused = refusal(accelerator.prepare, model, torch.optim.AdamW(model.parameters()))
    print(json.dumps({"refused": refused, "claims": len(local_shards._OPEN_CLAIMS)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
