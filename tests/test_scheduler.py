from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from nbaccel.config.handlers import GradientAccumulationPlugin
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.train.gradient import GradientState


class Loop:
    """One weight, one prepared optimizer and one prepared schedule."""

    def __init__(self, make, *, steps_per_call=1, plugin=None):
        self.weight = nn.Parameter(torch.tensor([1.0]))
        # Settings, or it would be the state of an accelerator that another test has left behind.
        self.state = GradientState(plugin or GradientAccumulationPlugin())
        inner = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer = AcceleratedOptimizer(inner, gradient_state=self.state)
        shared = {"gradient_state": self.state, "num_processes": steps_per_call}
        self.scheduler = AcceleratedScheduler(make(inner), [self.optimizer], True, **shared)

    def batch(self) -> None:
        (self.weight.sum() * 0.0).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def epochs(self, batches: int) -> list[int]:
        found = []
        for _ in range(batches):
            self.batch()
            found.append(self.scheduler.last_epoch)
        return found


def linear(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)


@pytest.mark.parametrize(
    ("make", "steps", "expected"),
    [
        (linear, 2, [2, 4, 6]),
        (linear, 1, [1, 2, 3]),
        (one_cycle, 2, [2, 3, 3, 3, 3]),
        (one_cycle, 1, [1, 2, 3, 3]),
    ],
)
def test_it_advances_as_often_as_there_are_processes_and_stops_at_its_end(make, steps, expected):
    assert Loop(make, steps_per_call=steps).epochs(len(expected)) == expected


def test_a_schedule_written_in_batches_advances_by_every_batch():
    plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=True)
    loop = Loop(linear, steps_per_call=2, plugin=plugin)
    found = []
    for in_group, sync in ((1, False), (2, False), (3, True), (1, False), (2, True)):
        loop.state.batches_in_group, loop.state.sync_gradients = in_group, sync
        loop.batch()
        found.append(loop.scheduler.last_epoch)
    assert found == [0, 0, 6, 6, 10], "the last group is a short one"
    assert (loop.scheduler.step_with_optimizer, loop.scheduler.split_batches) == (True, False)


def test_a_plateau_is_counted_in_calls_not_in_processes():
    loop = Loop(
        lambda inner: lr_scheduler.ReduceLROnPlateau(inner, factor=0.5, patience=1),
        steps_per_call=4,
    )
    loop.optimizer.step()
    rates = []
    for metric in (1.0, 1.0, 1.0, 1.0):
        loop.scheduler.step(metric)
        rates.append(loop.scheduler.get_last_lr())
    assert rates == [[1.0], [1.0], [0.5], [0.5]]


def test_it_is_the_scheduler_in_all_but_name():
    loop = Loop(linear)
    loop.batch()
    inner = loop.scheduler.scheduler
    assert isinstance(inner, lr_scheduler.LambdaLR)
    assert loop.scheduler.get_last_lr() == inner.get_last_lr() == [0.5]
    assert loop.scheduler.base_lrs == [1.0]
    assert "LambdaLR" in repr(loop.scheduler)
    fresh = Loop(linear)
    fresh.scheduler.load_state_dict(loop.scheduler.state_dict())
    assert fresh.scheduler.last_epoch == 1
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert loop.scheduler.get_lr() == [0.5]
    with pytest.raises(AttributeError, match="shoe_size"):
        _ = loop.scheduler.shoe_size


@pytest.mark.parametrize("way", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_it_travels(way):
    loop = Loop(lambda inner: lr_scheduler.StepLR(inner, 1))
    loop.batch()
    copied = way(loop.optimizer), way(loop.scheduler)
    assert copied[1].last_epoch == 1
    assert copied[1].get_last_lr() == [0.1]
