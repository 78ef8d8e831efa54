from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from nbaccel.config.handlers import GradScalerKwargs
from nbaccel.errors import ConfigError
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.precision.native import LossScaler
from nbaccel.train.gradient import GradientState


@pytest.fixture
def state() -> GradientState:
    return GradientState()


def parameter(value: float = 2.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def scaler(**settings):
    return LossScaler("cpu", **GradScalerKwargs(**settings).to_dict())


def test_it_steps_and_forgets_gradients_only_where_a_group_ends(state):
    weight = parameter()
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0), gradient_state=state)
    for sync, left in ((False, 2.0), (True, 0.0)):
        state.sync_gradients = sync
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert weight.item() == left
        assert (weight.grad is None) == sync


def test_it_is_the_optimizer_in_all_but_name(state):
    weight = parameter()
    inner = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.1)
    optimizer = AcceleratedOptimizer(inner, gradient_state=state)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert optimizer.defaults["weight_decay"] == 0.1
    weight.sum().backward()
    optimizer.step()
    assert optimizer.state is inner.state
    assert optimizer.state_dict()["state"][0]["step"].item() == 1
    optimizer.add_param_group({"params": [parameter()], "lr": 0.1})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.1]
    assert "AdamW" in repr(optimizer)
    with pytest.raises(AttributeError, match="shoe_size"):
        _ = optimizer.shoe_size
    weight = parameter()
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = AcceleratedOptimizer(inner, gradient_state=state)
    heard = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: heard.append("post"))
    weight.sum().backward()
    optimizer.step()
    handle.remove()
    inner.step()
    assert heard == ["pre", "post", "pre"]


def test_a_closure_is_passed_on_but_for_scaled_gradients(state):
    weight = parameter(4.0)
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS([weight], lr=1.0), gradient_state=state)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert weight.item() == pytest.approx(1.0)
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD([parameter()], lr=1.0), scaler=scaler(), gradient_state=state
    )
    with pytest.raises(ConfigError, match=r"closure.*fp16.*bf16"):
        optimizer.step(lambda: 0.0)


class ScheduleFree(torch.optim.SGD):
    """Has two modes, as schedule-free optimizers have."""

    mode = "none"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_train_and_eval_reach_optimizers_that_have_them(state):
    inner = ScheduleFree([parameter()], lr=1.0)
    optimizer = AcceleratedOptimizer(inner, gradient_state=state)
    optimizer.train()
    assert inner.mode == "train"
    optimizer.eval()
    assert inner.mode == "eval"
    AcceleratedOptimizer(torch.optim.SGD([parameter()], lr=1.0), gradient_state=state).train()


# ------------------------------------------------------------------------- with a scaler


def scaled_step(optimizer: AcceleratedOptimizer, weight: nn.Parameter, factor: float) -> None:
    optimizer.scaler.scale(weight.sum() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_infinite_gradients_skip_the_step_and_say_so(state, fused):
    weight = parameter()
    inner = torch.optim.SGD([weight], lr=1.0, fused=fused)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler(init_scale=8.0), gradient_state=state)
    assert optimizer.step_was_skipped is False
    found = []
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        scaled_step(optimizer, weight, factor)
        found.append((weight.item(), optimizer.step_was_skipped))
    assert found == [(1.0, False), (1.0, True), (1.0, True), (0.0, False)]
    assert optimizer.scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [False, True])
def test_each_of_two_optimizers_knows_about_itself(state, fused):
    weights = [parameter(), parameter()]
    shared = scaler(init_scale=8.0)
    first, second = (
        AcceleratedOptimizer(
            torch.optim.SGD([w], lr=1.0, fused=fused), scaler=shared, gradient_state=state
        )
        for w in weights
    )
    shared.scale(weights[0].sum() + weights[1].sum() * float("inf")).backward()
    first.step()
    second.step()
    shared.get_scale()  # the scaler adds up its flags in place
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)
    assert [weight.item() for weight in weights] == [1.0, 2.0]


class Around(torch.optim.Optimizer):
    """Wraps another optimizer without torch's constructor, as some packages do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_without_hooks_still_knows_whether_it_stepped(state):
    weight = parameter()
    inner = Around(torch.optim.SGD([weight], lr=1.0))
    optimizer = AcceleratedOptimizer(inner, scaler=scaler(init_scale=8.0), gradient_state=state)
    scaled_step(optimizer, weight, float("inf"))
    assert optimizer.step_was_skipped is True
    scaled_step(optimizer, weight, 1.0)
    assert optimizer.step_was_skipped is False


# ------------------------------------------------------------------------- travelling


@pytest.mark.parametrize("way", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_it_travels_and_goes_on(state, way):
    weight = parameter()
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD([weight], lr=1.0), scaler=scaler(init_scale=8.0), gradient_state=state
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # puts a closure on its step
    scaled_step(optimizer, weight, float("inf"))
    copied = way(optimizer)
    assert copied.step_was_skipped is True
    other = copied.param_groups[0]["params"][0]
    assert other is not weight
    scaled_step(copied, other, 1.0)
    assert copied.step_was_skipped is False
    assert (other.item(), weight.item()) == (1.0, 2.0)
