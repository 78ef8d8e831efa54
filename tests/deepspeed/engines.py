"""A small model trained by DeepSpeed's real engine, as a user's cell would do it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def config(stage: int, *, offload: str = "none", bf16: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4096}
    if stage == 3:
        # Otherwise parameters this small are left whole, and ZeRO-3 would be tested in name only.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 4096}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
        if stage == 3:
            zero["offload_param"] = {"device": offload}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }


def model(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def train(
    settings: dict[str, Any], network: nn.Module | None = None, steps: int = 4
) -> list[float]:
    """Losses of a few steps on one batch."""
    import deepspeed

    network = model() if network is None else network
    engine, *_ = deepspeed.initialize(model=network, config=settings)
    torch.manual_seed(1)
    rows = torch.randn(4, 16, dtype=next(engine.parameters()).dtype)
    losses = []
    for _ in range(steps):
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
