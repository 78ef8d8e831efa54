"""Whole models whose gradients are averaged once per step: the strategy of TPUs, here on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbaccel import WorkerFailed, debug_launcher
from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.strategies.replicas import ReplicasStrategy
from tests.worker_functions import join


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return torch.randn(6, 4)


def strategy_of(rank: int) -> ReplicasStrategy:
    cpu = torch.device("cpu")
    return ReplicasStrategy(Place(rank=rank, world_size=dist.get_world_size(), device=cpu))


def begin() -> tuple[int, ReplicasStrategy, nn.Module, torch.optim.Optimizer]:
    rank = join()
    strategy = strategy_of(rank)
    model = make_model()
    with torch.no_grad():
        # Each process begins with weights of its own, and has process 0's after `wrap`.
        model[0].bias.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    bundle = strategy.wrap(Bundle(models=(model,), optimizers=(optimizer,)))
    assert bundle.models == (model,)
    return rank, strategy, model, optimizer


def one_replica(backwards: int = 1) -> list[torch.Tensor]:
    """What one process computes that has the rows of both."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(backwards):
        loss = sum(model(rows(rank)).square().mean() for rank in (0, 1)) / 2
        loss.backward()
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def clipped_after_a_backward_of_the_user() -> float:
    rank, strategy, model, _ = begin()
    model(rows(rank)).square().mean().backward()
    return float(strategy.clip_grad_norm(model.parameters(), 0.1))


def other_parts_of_the_model() -> None:
    rank, strategy, model, _ = begin()
    used: Any = model if rank else model[0]
    strategy.backward(used(rows(rank)).square().mean(), sync=True)


def stepped(how: str) -> list[torch.Tensor]:
    rank, strategy, model, optimizer = begin()
    if how == "by the user":
        model(rows(rank)).square().mean().backward()
    for sync in {"by the strategy": [True], "twice": [False, True]}.get(how, []):
        strategy.backward(model(rows(rank)).square().mean(), sync=sync)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["by the strategy", "by the user", "twice"])
def test_processes_step_as_one_that_has_all_rows(how):
    for weights in debug_launcher(stepped, (how,)):
        for weight, expected in zip(weights, one_replica(1 + (how == "twice")), strict=True):
            torch.testing.assert_close(weight, expected)


def test_a_norm_is_that_of_the_averaged_gradients():
    norms = debug_launcher(clipped_after_a_backward_of_the_user)
    assert norms[0] == norms[1]
    model = make_model()
    (sum(model(rows(rank)).square().mean() for rank in (0, 1)) / 2).backward()
    assert norms[0] == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))


def test_gradients_of_different_parameters_are_refused_on_every_process():
    with pytest.raises(WorkerFailed, match=r"process 0: 2, process 1: 4 of them.*cannot be avera"):
        debug_launcher(other_parts_of_the_model)


def weights_before_placement() -> tuple[list[float], bool]:
    rank = join()
    strategy = strategy_of(rank)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(rank + 1)
    weight = model.weight
    assert strategy.before_placement is not None
    strategy.before_placement([model])
    return model.weight.flatten().tolist(), model.weight is weight


def test_all_begin_with_the_weights_of_process_0_before_they_are_moved():
    assert debug_launcher(weights_before_placement, num_processes=2) == [([1.0, 1.0], True)] * 2
