"""Checkpoints of real engines, each with the weights it must give back, made once for all tests.

Run as a module it makes them in the folder that it is given: those of two ranks in one launch,
those of one rank in its own process.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel import notebook_launcher
from nbaccel.config import RunConfig
from nbaccel.deepspeed.converting import fp32_state_dict, save_16bit_weights
from nbaccel.deepspeed.environment import deepspeed_environment
from nbaccel.deepspeed.local_shards import placeholders
from nbaccel.train.checkpoint import save_model
from tests.deepspeed.programs import refusal

CASES = {
    "0-fp32": {"stage": 0},
    "0-bf16": {"stage": 0, "bf16": True},
    "1-fp32": {"stage": 1},
    "1-bf16": {"stage": 1, "bf16": True},
    "2-fp32": {"stage": 2},
    "2-bf16": {"stage": 2, "bf16": True},
    "2-bf16-cpu": {"stage": 2, "bf16": True, "offload": {"device": "cpu"}},
    "3-fp32": {"stage": 3},
    "3-bf16": {"stage": 3, "bf16": True},
    "3-bf16-cpu": {"stage": 3, "bf16": True, "offload": {"device": "cpu"}},
}
ALONE = ("1-fp32", "2-bf16", "3-fp32", "3-bf16")


class Net(nn.Module):
    """Odd sizes, so that cuts need filling up; tied, frozen and empty parameters; buffers."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7))
        self.fixed = nn.Linear(7, 7).requires_grad_(is_whole)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("seen", torch.arange(6).reshape(2, 3).T)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.rand(4), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.words(rows)
        return self.head(hidden + self.fixed(self.body(hidden))) * self.scale.mean()


def config(stage: int, *, bf16: bool = False, offload: Any = None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000}
    if stage == 3:
        # Otherwise parameters this small stay whole, in a single sub-group.
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 100,
            "sub_group_size": 50,
        }
    if offload is not None:
        zero["offload_optimizer"] = offload
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }


def groups(network: nn.Module) -> list[dict[str, Any]]:
    """Two, as people have them: weight decay is not for vectors."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def train(settings: dict[str, Any], network: nn.Module, num_groups: int, steps: int = 3) -> Any:
    import deepspeed

    parameters = {} if num_groups == 1 else {"model_parameters": groups(network)}
    engine, *_ = deepspeed.initialize(model=network, config=settings, **parameters)
    rank = dist.get_rank()
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        rows = torch.randint(11, (4, 5))
        loss = nn.functional.cross_entropy(engine(rows).float().flatten(0, 1), rows.flatten())
        engine.backward(loss)
        engine.step()
    return engine


def theirs(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What DeepSpeed's own functions say: weights in fp32, and those that the model uses."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    masters, computed = {}, {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            computed[name] = parameter.detach().clone()
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        masters[name] = computed[name].float() if master is None else master.clone()
    for name, buffer in engine.module.named_buffers():
        if name != "cache":
            computed[name] = buffer.clone()
            masters[name] = buffer.float() if buffer.is_floating_point() else buffer.clone()
    return masters, computed


def make(folder: Path, name: str) -> None:
    """Train, save, and note beside it what the weights are and what was refused."""
    folder = folder / name
    settings = CASES[name]
    # Stage 0 trains all parameters, in one group; the others have frozen ones, and two groups.
    is_simple = settings["stage"] == 0
    network = Net(is_whole=is_simple)
    engine = train(config(**settings), network, 1 if is_simple else 2)
    engine.save_checkpoint(str(folder), tag="step3")
    (folder / "a-file").touch()
    masters, computed = theirs(engine)
    notes = {
        "theirs": masters,
        "computed": computed,
        "live": fp32_state_dict(engine),
        "trained": set(fp32_state_dict(engine, exclude_frozen_parameters=True)),
        "written": save_16bit_weights(engine, folder / "sixteen", max_shard_size=600),
        "refused": refusal(save_16bit_weights, engine, folder / "a-file"),
        "placeholders": placeholders(engine.module),
        "in_state": placeholders(engine.module.state_dict()),
    }
    if settings["stage"] == 3:
        notes["bad_save"] = refusal(save_model, engine.module.state_dict(), folder / "bad")
    torch.save(engine.module.state_dict(), folder / f"state_{dist.get_rank()}.bin")
    notes["written"] = [path.name for path in notes["written"].files]
    torch.save(notes, folder / f"notes_{dist.get_rank()}")
    engine.destroy()


def make_all(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        make(folder, name)
        gc.collect()


def by_their_script(folder: Path) -> None:
    """What DeepSpeed's own script makes of each checkpoint; it does not read stage 0."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for path in sorted(folder.glob("*/[123]-*")):
        torch.save(get_fp32_state_dict_from_zero_checkpoint(str(path)), path / "script")


def main(folder: Path) -> None:
    config = RunConfig(num_processes=2, device="cpu")
    notebook_launcher(make_all, (folder / "two", tuple(CASES)), config=config)
    with deepspeed_environment():
        make_all(folder / "one", ALONE)
    by_their_script(folder)
    print(json.dumps(str(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
