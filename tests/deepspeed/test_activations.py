"""Activations: counted on a copy without memory, held against what real runs allocate."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nbaccel.deepspeed.zero_memory import estimate_memory
from nbaccel.errors import ConfigError
from nbaccel.memory.activations import measure_activations
from nbaccel.strategies.model_blocks import checkpoints_gradients

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


def test_each_linear_layer_keeps_its_input(x):
    assert measure_activations(stack(5), x).saved == 5 * ROWS * WIDTH * 4


def test_16_bit_keeps_half(x):
    full, half = (measure_activations(stack(), x, precision=p).saved for p in ("fp32", "bf16"))
    assert full == 2 * half


def test_parameters_and_frozen_layers_are_no_activations(x):
    model = stack(5)
    for layer in model[:4]:
        layer.requires_grad_(requires_grad=False)
    assert measure_activations(model, x).saved == ROWS * WIDTH * 4


def test_gradient_checkpointing_keeps_less(x):
    as_it_is = measure_activations(Checkpointed(), x)
    again = measure_activations(Checkpointed(), x, gradient_checkpointing=True)
    assert again.saved < as_it_is.saved / 3
    assert again.saved < again.peak < as_it_is.peak


def test_what_is_on_already_is_measured_as_it_is(x):
    model = Checkpointed()
    model.gradient_checkpointing_enable()
    assert measure_activations(model, x) == measure_activations(
        Checkpointed(), x, gradient_checkpointing=True
    )


@pytest.mark.parametrize("make", [ended, Checkpointed, lambda: nn.TransformerEncoderLayer(64, 4)])
def test_the_peak_is_what_a_real_run_allocates(make, x):
    """Torch's own profiler, which hooks the allocator, tells what the real passes took."""
    model = make().train()
    expected = measure_activations(model, x).peak - x.nbytes
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(x).sum().backward()  # workspaces that live on are allocated now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(x).sum().backward()
    now = peak = 0
    for event in sorted(memory_events(found), key=lambda event: event[0]):
        now += event[1]
        peak = max(peak, now)
    assert expected == pytest.approx(peak, rel=0.1, abs=4096)


def memory_events(found):
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.start_ns(), event.nbytes()


def test_the_collection_of_garbage_waits_for_the_end(x):
    class Looks(nn.Linear):
        def forward(self, values):
            seen.append(gc.isenabled())
            return super().forward(values)

    seen = []
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            measure_activations(Looks(WIDTH, WIDTH), x)
            assert (seen.pop(), gc.isenabled()) == (False, was_on)
        finally:
            gc.enable()


def test_the_users_model_and_random_numbers_are_as_before(x):
    model = nn.Sequential(stack(2), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).eval()
    before, keys = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    seed = torch.get_rng_state()
    measure_activations(model, x)
    assert torch.equal(torch.get_rng_state(), seed)
    assert not model.training
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert [id(p) for p in model.parameters()] == keys
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_a_model_that_needs_values_is_run_on_a_real_copy(x):
    model = NeedsValues()
    before = [p.clone() for p in model.parameters()]
    assert measure_activations(model, x).saved >= 3 * ROWS * WIDTH * 4
    assert all(
        torch.equal(a, b) and b.grad is None
        for a, b in zip(before, model.parameters(), strict=True)
    )


def test_one_without_values_that_needs_them_is_refused(x):
    with torch.device("meta"):
        model = NeedsValues()
    with pytest.raises(ConfigError, match=r"NeedsValues cannot be measured.*activation_bytes"):
        measure_activations(model, x)


def test_a_batch_that_does_not_fit_the_model_is_refused_in_words(capfd):
    with pytest.raises(ConfigError, match=r"does not run with this sample_batch.*10.*batch as"):
        measure_activations(nn.Linear(10, 10), torch.ones(4, 7))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- transformers, and the estimate
@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.fixture
def tokens():
    ids = torch.zeros(2, 32, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_a_model_of_transformers_on_meta_is_measured_with_and_without(llama, tokens):
    plain, again = (
        estimate_memory(llama, sample_batch=tokens, gradient_checkpointing=on).device.activations
        for on in (False, True)
    )
    assert 0 < again < plain / 2
    assert not checkpoints_gradients(llama)
    assert all(p.is_meta for p in llama.parameters())


def test_the_configurations_batch_size_counts(llama, tokens):
    two, eight = (
        estimate_memory(
            llama, {"train_micro_batch_size_per_gpu": rows}, sample_batch=tokens
        ).device.activations
        for rows in (2, 8)
    )
    assert eight == pytest.approx(4 * two, rel=0.1)


def test_auto_is_filled_in_from_the_model(llama):
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    found = estimate_memory(llama, {"zero_optimization": zero, "train_batch_size": "auto"})
    assert found.settings.zero["reduce_bucket_size"] == 64 * 64
    assert found.settings.unknown == ()
    assert "auto" not in str(found)


def test_a_batch_needs_a_model_and_no_second_number(tokens):
    with pytest.raises(ConfigError, match=r"(?s)sample_batch needs the model.*both given"):
        estimate_memory((100, 10), sample_batch=tokens, activation_bytes=5)
