"""Loops whose time is known, for workers of test launches."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator

BATCHES = 24
SLOW_STEP_S = 0.05
SLOW_SAMPLE_S = 0.006
START_S = 3.0


class SlowDataset(TensorDataset):
    """Takes its time for each sample."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(SLOW_SAMPLE_S)
        return super().__getitem__(index)


def make_loader(num_processes: int, dataset_class: type[TensorDataset] = TensorDataset) -> Any:
    torch.manual_seed(0)
    inputs = torch.randn(BATCHES * 4 * num_processes, 8)
    return DataLoader(dataset_class(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class WarmsUp(nn.Linear):
    """Its first forward takes as long as a device that starts."""

    has_started = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.has_started:
            self.has_started = True
            time.sleep(START_S)
        return super().forward(inputs)


def train(
    slow_rank: int | None = None,
    dataset_class: type[TensorDataset] = TensorDataset,
    model_class: type[nn.Linear] = nn.Linear,
) -> int:
    """Train a small model, with a rank that takes longer for each step."""
    accelerator = Accelerator()
    model = model_class(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = make_loader(accelerator.num_processes, dataset_class)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in accelerator.progress(loader):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        loss = (model(inputs) - targets).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item(), "rank": float(accelerator.process_index)})
    if accelerator.is_main_process:
        sys.stderr.write("train.py:3: UserWarning: nearly done\n")
    return accelerator.process_index


def all_reduce_beside(slow_rank: int) -> None:
    """Sum tensors with torch's own functions; a rank comes late to each sum."""
    accelerator = Accelerator()
    for (inputs,) in accelerator.prepare(DataLoader(TensorDataset(torch.ones(40, 2)), 2)):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        dist.all_reduce(inputs)
        pending = dist.all_reduce(inputs, async_op=True)
        assert pending is not None
        pending.wait()


def gather_beside(slow_rank: int) -> None:
    """The same with the accelerator's functions."""
    accelerator = Accelerator()
    for (inputs,) in accelerator.prepare(DataLoader(TensorDataset(torch.ones(40, 2)), 2)):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        accelerator.gather(inputs)


def read_alone() -> None:
    """Go through a loader of torch's own, without a model."""
    accelerator = Accelerator()
    loader = make_loader(accelerator.num_processes, SlowDataset)
    for _ in accelerator.progress(loader):
        pass


def fail_after_loop(failing_rank: int) -> None:
    """Log something, and raise on one rank."""
    accelerator = Accelerator()
    for step in accelerator.progress(range(4)):
        accelerator.log({"loss": 1.0 / (1 + step)})
    if accelerator.process_index == failing_rank:
        raise ValueError("as asked")


def come_late_to_first_call(slow_rank: int) -> None:
    """Meet the others for the first time after the loop."""
    accelerator = Accelerator()
    for _ in accelerator.progress(range(4)):
        pass
    if accelerator.process_index == slow_rank:
        time.sleep(BATCHES * SLOW_STEP_S)
    accelerator.wait_for_everyone()
