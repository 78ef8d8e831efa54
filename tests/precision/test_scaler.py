from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from nbaccel.precision.native import LossScaler


def two(lr: float = 1.0):
    """Two parameters of one loss, with an optimizer each."""
    values = [nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))]
    return values, [torch.optim.SGD([value], lr=lr) for value in values]


def test_two_optimizers_of_one_loss_are_unscaled_by_the_same_factor():
    """Torch's own scaler, updated after each, divides the second by the factor that grew."""
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(values[0].sum() + values[1].sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert [value.item() for value in values] == [1.0, 2.0]
    assert scaler.get_scale() == 16.0


def test_gradients_that_were_unscaled_for_clipping_are_not_unscaled_again():
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum() + values[1].sum()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert [value.item() for value in values] == [1.0, 2.0]


def test_optimizers_that_take_turns_update_in_between():
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    for value, optimizer in zip(values, optimizers, strict=True):
        scaler.scale(value.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [value.item() for value in values] == [1.0, 2.0]
    assert scaler.get_scale() == 32.0


def test_one_infinite_gradient_lowers_the_factor_once_and_skips_its_optimizer_alone():
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum() * float("inf") + values[1].sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert [value.item() for value in values] == [2.0, 2.0]
    assert scaler.get_scale() == 4.0


def test_an_optimizer_may_step_twice_without_a_loss_in_between():
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum()).backward()
    for _ in range(2):
        scaler.step(optimizers[0])
        scaler.update()
    assert values[0].item() == 2.0 - 1.0 - 1.0 / 8


def test_an_optimizer_without_gradients_does_not_stop_the_other():
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.step(optimizers[0])
    scaler.update()
    scaler.scale(values[0].sum())
    assert values[0].item() == 1.0


@pytest.mark.parametrize("enabled", [True, False])
def test_its_state_is_torchs_and_what_waits_is_in_it(enabled):
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1, enabled=enabled)
    scaler.scale(values[0].sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    plain = torch.amp.GradScaler("cpu", enabled=enabled)
    plain.load_state_dict(scaler.state_dict())
    assert plain.get_scale() == (16.0 if enabled else 1.0)
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.get_scale() == plain.get_scale()
    other = LossScaler("cpu", enabled=enabled)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == plain.get_scale()


def test_a_new_factor_holds_at_once():
    values, _ = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum())
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0
