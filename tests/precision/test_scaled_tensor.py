from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from nbaccel.errors import ConfigError
from nbaccel.precision.fp8.scaled_adam import ScaledAdam
from nbaccel.precision.fp8.scaled_tensor import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    ScaledTensor,
    dequantize,
    power_of_two_scale,
    scale_and_quantize,
)

CLASSES = pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])


def pair(optimizer_class: Any, **options: Any) -> tuple[nn.Parameter, Any, nn.Parameter, Any]:
    """A weight and its optimizer in float32, and the same stored short."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=generator)
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    plain = nn.Parameter(values.clone())
    stored = nn.Parameter(ScaledTensor.of(values, FP16))
    return (
        plain,
        optimizer_class([plain], **options),
        stored,
        ScaledAdam(optimizer_class([stored], **options)),
    )


def gradients(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(64, 64, generator=generator)
    return [common + torch.randn(64, 64, generator=generator) for _ in range(count)]


@CLASSES
@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.95)}], ids=str)
def test_it_steps_like_torchs_with_the_error_of_8_bits(optimizer_class, options):
    plain, optimizer, stored, scaled = pair(optimizer_class, **options)
    start = plain.detach().clone()
    for gradient in gradients(40):
        plain.grad, stored.grad = gradient, ScaledTensor.of(gradient, E4M3)
        optimizer.step()
        scaled.step()
    moved = (plain - start).norm()
    assert ((stored.detach().dequantize() - plain).norm() / moved).item() < 0.03


def test_it_follows_a_schedule_and_goes_on_from_a_file_bit_by_bit():
    _, _, stored, scaled = pair(torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.StepLR(scaled.given, 1, gamma=0.5)
    stored.grad = ScaledTensor.of(gradients(1)[0], E4M3)
    scaled.step()  # with warnings as errors: the schedule must know of the step
    schedule.step()
    assert scaled.param_groups[0]["lr"] == pytest.approx(5e-3)
    scaled.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(scaled.param_groups) == 2
    _, _, stored, scaled = pair(torch.optim.AdamW)
    for gradient in gradients(5):
        stored.grad = ScaledTensor.of(gradient, E4M3)
        scaled.step()
    file = io.BytesIO()
    torch.save(scaled.state_dict(), file)
    file.seek(0)
    twin = nn.Parameter(stored.detach().clone())
    other = ScaledAdam(torch.optim.AdamW([twin], lr=5.0))
    other.load_state_dict(torch.load(file, weights_only=True))  # plain tensors: no class of ours
    for gradient in gradients(3, seed=7):
        stored.grad, twin.grad = (ScaledTensor.of(gradient, E4M3) for _ in range(2))
        scaled.step()
        other.step()
    assert torch.equal(stored.detach().dequantize(), twin.detach().dequantize())


def test_other_optimizers_are_refused_with_the_level_that_takes_them():
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"this optimizer is SGD.*AdamW or Adam.*O1"):
        ScaledAdam(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(ConfigError, match=r"AdamW\(amsgrad=True\) keeps a third"):
        ScaledAdam(torch.optim.AdamW([weight], amsgrad=True))


@given(amax=st.floats(1e-30, 1e30), margin=st.integers(0, 3))
def test_a_scale_is_a_power_of_two_and_the_largest_that_fits(amax, margin):
    scale = power_of_two_scale(torch.tensor(amax), E4M3, margin).item()
    assert math.frexp(scale)[0] == 0.5
    scaled = torch.tensor(amax).item() * scale * 2**margin
    # Half a unit of float32 on either side: the logarithm is rounded, too.
    assert E4M3.maximum / 2 * (1 - 1e-6) < scaled <= E4M3.maximum * (1 + 1e-6)


def test_zero_keeps_a_scale_of_one_and_infinity_becomes_nan():
    payload, inverse = scale_and_quantize(torch.zeros(4), E4M3)
    assert inverse == 1
    assert payload.float().eq(0).all()
    for bad in (math.inf, math.nan):
        payload, inverse = scale_and_quantize(torch.tensor([1.0, bad]), E4M3)
        # All of it: a single infinite element must not be cut to 448.
        assert dequantize(payload, inverse).isnan().all()


def stored(number_format=FP16, shape=(8, 16), seed=0) -> ScaledTensor:
    generator = torch.Generator().manual_seed(seed)
    return ScaledTensor.of(torch.randn(shape, generator=generator), number_format)


@pytest.mark.parametrize("number_format", [E4M3, E5M2, FP16, BF16], ids=lambda f: f.name)
def test_to_torch_it_is_float32_and_in_memory_it_is_short(number_format):
    tensor = stored(number_format, (64, 64))
    assert tensor.dtype is torch.float32
    assert tensor.shape == (64, 64)
    assert tensor.stored_bytes == 64 * 64 * number_format.dtype.itemsize + 4
    assert number_format.name in repr(tensor)


def test_operations_write_in_place_and_a_product_with_one_number_is_exact():
    tensor = stored(E4M3)
    before, payload = tensor.dequantize(), tensor.payload.clone()
    tensor.mul_(0.3)
    tensor.mul_(torch.tensor(2.0))
    tensor.div_(4)
    assert torch.equal(tensor.payload.view(torch.uint8), payload.view(torch.uint8))
    assert torch.allclose(tensor.dequantize(), before * 0.15, rtol=1e-6)
    tensors = [stored(seed=1), stored(seed=2)]
    expected = [tensor.dequantize() * 3 for tensor in tensors]
    torch._foreach_mul_(tensors, 3.0)
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.allclose(tensor.dequantize(), values, rtol=2e-3)
    tensor = stored()
    tensor.detach().zero_()
    assert tensor.dequantize().eq(0).all()
    other = stored()
    clone = other.clone()
    clone.zero_()
    assert not other.dequantize().eq(0).all()


def test_it_is_copied_saved_and_sent_as_it_is(tmp_path):
    weight = nn.Parameter(stored())
    twin = copy.deepcopy(weight)
    assert isinstance(twin, ScaledTensor)
    assert twin.requires_grad
    buffer = io.BytesIO()
    torch.save(weight.detach(), buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)
    sent = pickle.loads(pickle.dumps(weight.detach()))
    for item in (twin, read, sent):
        assert torch.equal(item.detach().dequantize(), weight.detach().dequantize())


def test_it_trains_clips_and_steps_like_a_parameter():
    weight = nn.Parameter(stored())
    weight.grad = stored(E4M3, seed=3)
    before = weight.detach().dequantize()
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert norm > 1
    assert nn.utils.get_total_norm([weight.grad]) == pytest.approx(1, rel=1e-4)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.step()
    expected = before - 0.1 * weight.grad.dequantize()
    assert torch.allclose(weight.detach().dequantize(), expected, atol=2e-3)
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.dequantize().eq(0).all()
