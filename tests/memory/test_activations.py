"""Activations counted on a copy without memory, bytes while they live, batches of every form."""

from __future__ import annotations

import copy
import gc
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nbaccel.errors import ConfigError
from nbaccel.memory.activations import (
    LiveBytes,
    call,
    loss_of,
    measure_activations,
    num_samples,
    resized,
)

WIDTH, ROWS = 64, 32


def stack(layers=5, **kwargs):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, **kwargs) for _ in range(layers)))


def ended():
    """With a last gradient that is a tensor of its own: the kernel of a product copies others."""
    return nn.Sequential(stack(), nn.Tanh())


class Checkpointed(nn.Module):
    """The same stack; its activations are computed again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(stack(4), nn.Tanh()) for _ in range(4))
        self.again = False

    def gradient_checkpointing_enable(self):
        self.again = True

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


class NeedsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = stack(3)

    def forward(self, x):
        return self.inner(x) * (2.0 if x.sum().item() > 0 else 1.0)


@pytest.fixture
def x():
    return torch.randn(ROWS, WIDTH)


def test_what_is_kept_for_the_backward_pass_is_counted(x):
    full = measure_activations(stack(5), x)
    assert measure_activations(stack(10), x) - full == 5 * ROWS * WIDTH * 4
    halves = [measure_activations(stack(n), x, precision="bf16") for n in (5, 10)]
    assert halves[1] - halves[0] == 5 * ROWS * WIDTH * 2
    model = stack(5)
    for layer in model[:4]:
        layer.requires_grad_(requires_grad=False)
    assert full - measure_activations(model, x) == 4 * ROWS * WIDTH * 4


def test_gradient_checkpointing_keeps_less_whoever_has_turned_it_on(x):
    as_it_is = measure_activations(Checkpointed(), x)
    again = measure_activations(Checkpointed(), x, gradient_checkpointing=True)
    assert again < as_it_is * 0.6
    model = Checkpointed()
    model.gradient_checkpointing_enable()
    assert measure_activations(model, x) == measure_activations(
        Checkpointed(), x, gradient_checkpointing=True
    )


@pytest.mark.parametrize("make", [ended, Checkpointed, lambda: nn.TransformerEncoderLayer(64, 4)])
def test_the_peak_is_what_a_real_run_allocates(make, x):
    """Torch's own profiler, which hooks the allocator, tells what the real passes took."""
    model = make().train()
    expected = measure_activations(model, x) - x.nbytes
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(x).sum().backward()  # workspaces that live on are allocated now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(x).sum().backward()
    now = peak = 0
    events = found.profiler.kineto_results.events()
    of_memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(of_memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert expected == pytest.approx(peak, rel=0.1, abs=4096)


def test_the_users_model_and_random_numbers_are_as_before(x):
    model = nn.Sequential(stack(2), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).eval()
    before, keys = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    seed = torch.get_rng_state()
    measure_activations(model, x)
    assert gc.isenabled()
    assert torch.equal(torch.get_rng_state(), seed)
    assert not model.training
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert [id(p) for p in model.parameters()] == keys
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_a_model_that_needs_values_is_run_on_a_real_copy_and_refused_without(x):
    model = NeedsValues()
    before = [p.clone() for p in model.parameters()]
    assert measure_activations(model, x) >= 3 * ROWS * WIDTH * 4
    assert all(
        torch.equal(a, b) and b.grad is None
        for a, b in zip(before, model.parameters(), strict=True)
    )
    with torch.device("meta"):
        model = NeedsValues()
    with pytest.raises(ConfigError, match=r"NeedsValues cannot be measured.*activation_bytes"):
        measure_activations(model, x)


def test_a_batch_that_does_not_fit_the_model_is_refused_in_words(capfd):
    with pytest.raises(ConfigError, match=r"does not run with this sample_batch.*10.*batch as"):
        measure_activations(nn.Linear(10, 10), torch.ones(4, 7))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- bytes while they live
MIB = 2**20


def mebi(number):
    return torch.empty(number * MIB, dtype=torch.uint8)


def test_bytes_count_once_while_they_live_with_their_peak():
    with LiveBytes() as live:
        first = mebi(3)
        second = mebi(2)
        del first
        third = mebi(1)
        assert (live.now, live.peak) == (3 * MIB, 5 * MIB)
    del second, third
    with LiveBytes() as live:
        whole = mebi(4)
        part = whole[:MIB].view(-1, 2)
        assert live.now == 4 * MIB
        del whole
        assert live.now == 4 * MIB, "the view holds it"
        del part
        assert live.now == 0
    there = mebi(2)
    with LiveBytes([there]) as live:
        view = there[1:]
        assert live.now == 0
        live.adopt([there, view])
        assert (live.now, live.peak) == (2 * MIB, 2 * MIB)
        del there, view
        assert live.now == 0
    with LiveBytes() as live:
        grown = mebi(1)
        grown.resize_(3 * MIB)
        assert live.now == 3 * MIB
    del grown
    with LiveBytes(device="cpu") as live:
        away = torch.empty(MIB, device="meta")
        here = mebi(1)
        assert live.now == MIB
    del away, here


def test_one_that_is_made_where_another_was_freed_is_counted():
    """The allocator gives the same address again and again."""
    for _ in range(20):
        there = mebi(1)
        with LiveBytes([there]) as live:
            del there
            made = mebi(1)
            assert live.now == MIB
        del made


# ---------------------------------------------------------------- batches
Pair = namedtuple("Pair", "inputs targets")  # noqa: PYI024 - as users write it


def test_a_batch_is_cut_and_repeated_along_its_samples_and_keeps_its_form():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "mask": torch.ones(2),
        "n": 7,
        "scale": torch.ones(()),
    }
    assert num_samples(batch) == 3
    assert resized(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
    more = resized(batch, 7)
    assert more["x"].shape == (7, 2)
    assert more["x"][3:5].tolist() == [[0, 1], [2, 3]]
    assert (more["mask"].shape, more["n"], more["scale"].shape) == ((2,), 7, ())
    pair = Pair(torch.ones(4), [torch.ones(4), (torch.ones(4), None)])
    found = resized(pair, 2)
    assert isinstance(found, Pair)
    assert found.targets[1][0].shape == (2,)
    assert found.targets[1][1] is None
    assert resized(UserDict(a=torch.ones(1)), 2)["a"].tolist() == [1, 1]
    whole = torch.ones(1000)
    assert resized(whole, 2).untyped_storage().nbytes() == 8
    with pytest.raises(ConfigError, match=r"is a dict without tensors.*what your loader gives"):
        num_samples({"text": "words"})


def test_a_model_takes_as_many_of_a_tuple_as_it_has_arguments_for():
    one, two = nn.Linear(2, 1), nn.Bilinear(2, 2, 1)
    x = torch.ones(3, 2)
    assert call(one, (x, torch.zeros(3))).shape == (3, 1)
    assert call(two, [x, x, torch.zeros(3)]).shape == (3, 1)
    assert call(one, {"input": x}).shape == (3, 1)
    assert call(one, x).shape == (3, 1)


def test_a_loss_is_the_models_own_or_the_sum_of_its_outputs():
    x = torch.ones(3, requires_grad=True)
    assert loss_of({"loss": x[0], "logits": x}).item() == 1
    assert loss_of(SimpleNamespace(loss=x[0] * 2, logits=x)).item() == 2
    assert loss_of((x, {"more": x * 2, "count": torch.tensor(3)})).item() == 9
    assert loss_of(SimpleNamespace(loss=None, logits=x)).item() == 3
    with pytest.raises(ConfigError, match=r"returned a Tensor without a tensor that has grad"):
        loss_of(torch.ones(2))
