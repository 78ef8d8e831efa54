"""Optimizers, schedules and a model's forward beside Accelerate's own, in the same loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.precision.native import Bf16
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.train.gradient import GradientState

SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
}
GROUP = 2  # batches for one optimizer step


def trained(model: nn.Module, optimizer: Any, scheduler: Any, state: Any) -> list[Any]:
    """Learning rates and losses of a loop that accumulates; `state` says where a group ends."""
    torch.manual_seed(1)
    found: list[Any] = []
    for batch in range(12):
        state.sync_gradients = batch % GROUP == GROUP - 1
        loss = model(torch.randn(4, 3)).square().mean() / GROUP
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((loss.item(), scheduler.get_last_lr(), scheduler.last_epoch))
    return found


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_and_learning_rates_are_those_of_accelerate(name: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState as GradientStateOfTheirs

    model, inner = model_and_optimizer()
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = accelerator.prepare(inner, SCHEDULES[name](inner))

    class Plain:
        last_epoch = property(lambda _: scheduler.scheduler.last_epoch)
        step = staticmethod(scheduler.step)
        get_last_lr = staticmethod(scheduler.get_last_lr)

    try:
        theirs = trained(model, optimizer, Plain(), accelerator.gradient_state)
    finally:  # Accelerate keeps its state for the whole process
        GradientStateOfTheirs._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)

    model, inner = model_and_optimizer()
    state = GradientState()
    prepared = AcceleratedOptimizer(inner, gradient_state=state)
    schedule = AcceleratedScheduler(
        SCHEDULES[name](inner), [prepared], gradient_state=state, num_processes=1
    )
    assert trained(model, prepared, schedule, state) == theirs


# ------------------------------------------------------------------ what a model's forward computes


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"raw": y, "pair": (self.norm(y), [y.double(), y.argmax(-1), "word", None])}


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return flat(list(tree.values()))
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flat(item)]
    return [(tree.dtype, tree.tolist()) if isinstance(tree, torch.Tensor) else tree]


def test_bfloat16_gives_the_digits_and_dtypes_of_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.manual_seed(0)
    model, x = Nested(), torch.randn(5, 4)
    try:
        theirs = flat(Accelerator(cpu=True, mixed_precision="bf16").prepare(model)(x))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    own = Nested()
    own.load_state_dict(model.state_dict())
    Bf16(torch.device("cpu"), AutocastKwargs(), GradScalerKwargs()).wrap_forward(own)
    assert flat(own(x)) == theirs
