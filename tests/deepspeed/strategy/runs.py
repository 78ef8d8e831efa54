"""What the launches of these tests run in their workers: real DeepSpeed on scikit-learn's digits.

One launch trains many small models one after another, since a launch costs more than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, DeepSpeedPlugin

ROWS = 256


@dataclass(frozen=True)
class Row:
    """One way to train."""

    stage: int | None = None
    precision: str = "no"
    offload: str = "none"
    accumulate: int = 1
    clip: float | None = 0.5
    optimizer: str = "AdamW"
    cpu: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def plugin(self) -> DeepSpeedPlugin | None:
        if self.stage is None:
            return None
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            # Otherwise parameters this small stay whole, and ZeRO-3 would be tested in name only.
            zero["stage3_param_persistence_threshold"] = 0
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": self.offload}
            if self.stage == 3:
                zero["offload_param"] = {"device": self.offload}
        return DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, **self.more})


def net(seed: int = 0) -> nn.Module:
    """Sizes that two processes cannot halve, a buffer, and two tied weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 10)
    )
    model[3].weight = model[2].weight
    model.register_buffer("scale", torch.ones(3))
    return model


def data(rows: int = ROWS) -> TensorDataset:
    values, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(values[:rows], dtype=torch.float32) / 16, torch.tensor(labels[:rows])
    )


def loader(batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=batch_size)


def train(model: nn.Module, row: Row, steps: int = 6) -> dict[str, Any]:
    """Train for some batches; what a loop can see of it, equal on all processes."""
    accelerator = Accelerator(
        deepspeed_plugin=row.plugin(),
        mixed_precision=row.precision,
        gradient_accumulation_steps=row.accumulate,
        cpu=row.cpu,
    )
    optimizer = getattr(torch.optim, row.optimizer)(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    prepared, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, loader(), scheduler
    )
    losses, norms = [], []
    for number, (values, labels) in enumerate(batches):
        if number == steps:
            break
        with accelerator.accumulate(prepared):
            loss = F.cross_entropy(prepared(values), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients and row.clip is not None:
                norms.append(accelerator.clip_grad_norm_(prepared.parameters(), row.clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(prepared)
    return {
        "losses": losses,
        "norms": norms,
        "rate": scheduler.get_last_lr()[0],
        "state": {name: value.clone() for name, value in state.items()},
        "type": accelerator.distributed_type.value,
        "first": tuple(next(prepared.parameters()).shape),
        "metrics": accuracy(accelerator, prepared),
    }


def accuracy(accelerator: Accelerator, model: nn.Module) -> tuple[int, int]:
    """Right answers and samples, over data whose last batch has to be filled up."""
    batches = accelerator.prepare(DataLoader(data(100), batch_size=16))
    right = count = 0
    with torch.no_grad():
        for values, labels in batches:
            pair = (model(values).argmax(-1), labels)
            answers, truth = accelerator.gather_for_metrics(pair)
            right += int((answers == truth).sum())
            count += len(truth)
    return right, count


def train_all(models: dict[str, nn.Module], rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    return {name: train(models[name], row) for name, row in rows.items()}
