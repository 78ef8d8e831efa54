from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.precision.fp8.linear import (
    GRADIENT,
    INPUT,
    WEIGHT,
    AmaxHistory,
    Fp8Linear,
    LayerRecipe,
    convert_layer,
    scaled_product,
)
from nbaccel.precision.fp8.scaled_tensor import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    ScaledTensor,
    scale_and_quantize,
)
from nbaccel.precision.fp8_layers import require_layers, restore_layers, select_layers

CPU = torch.device("cpu")
EMULATED = pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "kernel"])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())


def passes(layer: nn.Linear, values: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient, weight gradient, bias gradient."""
    layer.zero_grad()
    values = values.clone().requires_grad_()
    output = layer(values)
    output.backward(gradient)
    assert layer.bias.grad is not None
    weight_gradient: Any = layer.weight.grad
    plain = weight_gradient + 0  # stored ones as values
    return [output.detach(), values.grad, plain, layer.bias.grad]  # type: ignore[list-item]


def converted(layer: nn.Linear, **settings: Any) -> nn.Linear:
    layer = copy.deepcopy(layer)
    convert_layer(layer, LayerRecipe(**{"emulate": True, **settings}))
    return layer


@pytest.fixture
def case() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(256, 512), torch.randn(4, 16, 256), torch.randn(4, 16, 512)


@EMULATED
def test_all_three_products_have_the_error_of_8_bits(case, emulate):
    layer, values, gradient = case
    wanted = passes(layer, values, gradient)
    found = passes(converted(layer, emulate=emulate), values, gradient)
    errors = [error(a, b) for a, b in zip(found, wanted, strict=True)]
    # Of E4M3 forward (3 %), of E5M2 with E4M3 backward (6 %); the bias is exact.
    assert 0.02 < errors[0] < 0.05
    assert 0.04 < errors[1] < 0.08
    assert 0.04 < errors[2] < 0.08
    assert errors[3] == 0


@pytest.mark.parametrize("number", [0, 1, 2], ids=["forward", "input", "weight"])
def test_single_passes_can_be_exact(case, number):
    layer, values, gradient = case
    wanted = passes(layer, values, gradient)
    exact = tuple(index == number for index in range(3))
    found = passes(converted(layer, exact_passes=exact), values, gradient)
    errors = [error(a, b) for a, b in zip(found[:3], wanted[:3], strict=True)]
    assert errors[number] < 1e-6
    assert all(e > 0.02 for index, e in enumerate(errors) if index != number)


def test_evaluation_is_exact_unless_asked_and_only_payloads_are_kept_for_the_backward_pass(case):
    layer, values, _ = case
    plain = converted(layer).eval()
    assert torch.equal(plain(values), layer(values))
    asked = converted(layer, in_evaluation=True).eval()
    assert not torch.equal(asked(values), layer(values))
    layer, values, _ = case
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        converted(layer)(values.requires_grad_())
    assert {tensor.dtype for tensor in kept if tensor.dim()} == {torch.float8_e4m3fn}


def test_sizes_that_16_does_not_divide_are_padded():
    torch.manual_seed(0)
    left, right = torch.randn(5, 7), torch.randn(3, 7)
    left_payload, left_inverse = scale_and_quantize(left, E4M3)
    right_payload, right_inverse = scale_and_quantize(right, E4M3)
    inverses = (left_inverse, right_inverse)
    wanted = scaled_product(left_payload, right_payload, inverses, torch.float32, emulate=True)
    seen: list[tuple[torch.Size, torch.Size]] = []
    multiply = torch_private.multiply_scaled

    def watched(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        seen.append((a.shape, b.shape))
        return multiply(a, b, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "multiply_scaled", watched)
        found = scaled_product(left_payload, right_payload, inverses, torch.float32, emulate=False)
    # What a GPU refuses otherwise; the rows of the left one may be any number.
    assert seen == [(torch.Size([5, 16]), torch.Size([16, 16]))]
    assert found.shape == (5, 3)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_scaled_weight_gets_a_scaled_gradient_that_adds_up(case):
    layer, values, gradient = case
    wanted = passes(layer, values, gradient)
    scaled = copy.deepcopy(layer)
    scaled.weight = nn.Parameter(ScaledTensor.of(scaled.weight, FP16))
    convert_layer(scaled, LayerRecipe(emulate=True, weight_gradients=E4M3))
    found = passes(scaled, values, gradient)
    assert isinstance(scaled.weight.grad, ScaledTensor)
    assert scaled.weight.grad.number_format is E4M3
    assert error(found[2], wanted[2]) < 0.09
    scaled(values).backward(gradient)
    assert error(scaled.weight.grad.dequantize(), 2 * wanted[2]) < 0.1
    convert_layer(scaled, LayerRecipe(emulate=True, weight_gradients=BF16))
    scaled.weight.grad = None
    scaled(values).backward(gradient)
    assert scaled.weight.grad.number_format is BF16


# ---------------------------------------------------------------- delayed scaling


def history(*names: str, **settings: Any) -> AmaxHistory:
    options = {"length": 4, "margin": 0, "interval": 1, "takes_latest": False, "device": CPU}
    return AmaxHistory(names or ["a"], (E4M3, E4M3, E5M2), **{**options, **settings})


def after(amaxes: list[float], **settings: Any) -> float:
    """The scale of inputs after steps with these magnitudes."""
    steps = history(**settings)
    for amax in amaxes:
        steps.amaxes[INPUT, 0] = amax
        steps.update()
    return float(steps.scales[INPUT, 0])


def test_weights_take_their_own_scale_until_there_is_history(case):
    assert after([7.0, 1.0]) == 64.0  # 448 / 7
    assert after([7.0, 1.0], takes_latest=True) == 256.0  # 448 / 1, a power of two
    assert after([7.0, 1.0, 1.0, 1.0, 1.0]) == 256.0  # 7 has left the window of four
    assert after([7.0], margin=1) == 32.0
    layer, values, gradient = case
    steps = history()
    delayed = converted(layer, history=steps)
    first = passes(delayed, values, gradient)
    current = passes(converted(layer), values, gradient)
    for one, other in zip(first, current, strict=True):
        assert torch.equal(one, other)
    assert steps.amaxes[INPUT, 0] == values.abs().max()
    assert steps.amaxes[WEIGHT, 0] == layer.weight.abs().max()
    assert steps.amaxes[GRADIENT, 0] == gradient.abs().max()
    delayed(values * 10)
    assert steps.amaxes[INPUT, 0] == (values * 10).abs().max()
    delayed(values)
    assert steps.amaxes[INPUT, 0] == (values * 10).abs().max()
    steps.update()
    # Sixteen times larger than before: cut off, as delayed scaling does.
    assert error(delayed(values * 160), layer(values * 160)) > 0.3
    with pytest.raises(Exception, match=r"over 4 steps; this model has 1 over 9"):
        history(length=9).load_state_dict(steps.state_dict())


# ---------------------------------------------------------------- compilation


def train(compile_with: str | None, with_history: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    steps = history("0", "2", length=16)
    for index, layer in enumerate(select_layers(model, skip_first_and_last=False).chosen.values()):
        recipe = LayerRecipe(
            emulate=True, history=steps if with_history else None, layer_index=index
        )
        convert_layer(layer, recipe)
    forward: Any = torch.compile(model, backend=compile_with) if compile_with else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    inputs, targets = torch.randn(64, 32), torch.randn(64, 16)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(inputs)
        loss = (output.float() - targets).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.update()
        losses.append(loss.item())
    return losses


# Dynamo's own, when it looks into an autograd function: torch 2.13.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("with_history", [False, True], ids=["current", "delayed"])
def test_compiled_layers_train_the_same_in_one_graph(with_history):
    dynamo = importlib.import_module("torch._dynamo")
    counters = importlib.import_module("torch._dynamo.utils").counters
    dynamo.reset()
    counters.clear()
    assert train("aot_eager", with_history) == train(None, with_history)
    assert sum(counters["graph_break"].values()) == 0
    dynamo.reset()


# ---------------------------------------------------------------- which layers


def test_a_model_of_which_no_layer_computes_in_8_bits_is_refused():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    selection = select_layers(model, skip_first_and_last=True)
    with pytest.raises(Exception, match=r"no layer of Sequential.*0 \(the first layer\).*False"):
        require_layers([(model, selection)])
    convolution = nn.Conv2d(1, 1, 1)
    with pytest.raises(Exception, match=r"it has no torch.nn.Linear"):
        require_layers([(convolution, select_layers(convolution, skip_first_and_last=False))])


def test_layers_become_what_they_were_and_tied_ones_stay_tied():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    first.weight = second.weight = nn.Parameter(ScaledTensor.of(torch.randn(16, 16), FP16))
    model = nn.Sequential(first, second)
    for layer in (first, second):
        convert_layer(layer, LayerRecipe(emulate=True))
    assert type(model[0]) is Fp8Linear
    assert "fp8" in repr(model)
    state = model.state_dict()
    assert type(state["0.weight"]) is torch.Tensor
    ((old, new),) = restore_layers(model)
    assert isinstance(old, ScaledTensor)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is model[1].weight is new
    assert torch.equal(new, state["0.weight"])
    assert restore_layers(model) == []
