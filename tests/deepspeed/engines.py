"""Small models trained by DeepSpeed's real engine, one after another, as cells of a notebook would.

Run as a module it tells what became of each run, as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from nbaccel.deepspeed.environment import deepspeed_environment
from nbaccel.deepspeed.zero_memory import estimate_memory
from nbaccel.memory.estimate import measure
from tests.leak_police import IMPORT_TIME_VARIABLES

WIDTH = 256
RUNS = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "bf16": True},
    {"stage": 2, "offload": "cpu", "bf16": True},
    {"stage": 3, "bf16": True},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "offload": "cpu"},
)


def world() -> dict[str, Any]:
    """What a run could leave behind in its process."""
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    return {
        "environ": {k: v for k, v in os.environ.items() if k not in IMPORT_TIME_VARIABLES},
        "group": dist.is_initialized(),
        "listening": listening,
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What differs; of the environment the names alone, since values may be secrets."""
    found = {key: after[key] for key in after if after[key] != before[key]}
    if "environ" in found:
        old, new = before["environ"], after["environ"]
        found["environ"] = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    return found


def config(stage: int, *, offload: str = "none", bf16: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000}
    if stage == 3:
        # Otherwise parameters this small are left whole, and ZeRO-3 would be tested in name only.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1000}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
        if stage == 3:
            zero["offload_param"] = {"device": offload}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def train(settings: dict[str, Any], network: nn.Module, steps: int = 3) -> tuple[list[float], int]:
    """Losses of a few steps on one batch, and the bytes alive when the last one is made."""
    import deepspeed

    own = {id(p) for p in network.parameters()}
    held = [t for t in tensors() if id(t) not in own]  # held, so that nothing comes to lie there
    engine, *_ = deepspeed.initialize(model=network, config=settings)
    innermost = engine.optimizer
    while hasattr(innermost, "optimizer"):
        innermost = innermost.optimizer
    step, alive = innermost.step, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        alive.append(bytes_of(tensors()) - bytes_of(held))
        return step(*args, **kwargs)

    torch.manual_seed(1)
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    rows = torch.randn(4, WIDTH).to(dtype)  # some torches draw other numbers for bfloat16
    losses = []
    for number in range(steps):
        loss = engine(rows).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        del loss
        if number == steps - 1:
            innermost.step = watched
        engine.step()
    del innermost.step
    return losses, alive[-1]


def tensors() -> list[torch.Tensor]:
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


def bytes_of(found: list[torch.Tensor]) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found)}
    return sum(storages.values())


def run(stage: int, **more: Any) -> dict[str, Any]:
    before, settings = world(), config(stage, **more)
    estimate = estimate_memory(model(), settings)
    with deepspeed_environment():
        losses, measured = train(settings, model())
    after = world()
    live = tensors()
    return {
        "settings": {"stage": stage, **more},
        "losses": losses,
        "measured": measured,
        "estimated": (estimate.device + estimate.host).total,
        "left": changes(before, after),
        "live": [len(live), bytes_of(live)],
    }


def zero_init() -> dict[str, Any]:
    import deepspeed

    settings = config(3)
    with deepspeed_environment():
        with deepspeed.zero.Init(config_dict_or_path=settings):
            network = model()
        shapes = {tuple(p.shape) for p in network.parameters()}
        counted = measure(network).total
        losses, _ = train(settings, network)
    refused = ""
    try:
        with deepspeed_environment():
            train(config(2), network)
    except (KeyError, IndexError, RuntimeError) as error:
        refused = type(error).__name__
    return {
        "shapes": sorted(shapes),
        "counted": counted,
        "really": measure(model()).total,
        "losses": losses,
        "stage_2": refused,
    }


if __name__ == "__main__":
    first = zero_init()
    gc.collect()  # the model whose engine failed holds that engine by its hooks, and so its group
    gc.freeze()  # a million objects of imported modules need not be looked through each time
    trained = [run(**settings) for settings in RUNS]
    print(json.dumps({"zero_init": first, "trained": trained}))
