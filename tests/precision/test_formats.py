from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from nbaccel.precision.fp8.formats import (
    E4M3,
    E5M2,
    FP16,
    dequantize,
    power_of_two_scale,
    scale_and_quantize,
)

FORMATS = pytest.mark.parametrize("number_format", [E4M3, E5M2, FP16], ids=lambda f: f.name)


@FORMATS
def test_rounding_by_arithmetic_is_the_cast_bit_by_bit(number_format):
    """Devices without 8-bit floats get the very same numbers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator) * torch.exp2(
        torch.randint(-24, 16, (200_000,), generator=generator).float()
    )
    values = values.clamp(-number_format.maximum, number_format.maximum)
    rounded = number_format.rounded(values)
    assert torch.equal(rounded, values.to(number_format.dtype).float())


@FORMATS
def test_values_beyond_the_range_are_cut(number_format):
    cast = number_format.cast(torch.tensor([1e6, -1e6, 1.0]))
    assert cast.tolist()[:2] == [number_format.maximum, -number_format.maximum]


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


def test_an_empty_tensor_has_a_scale():
    payload, inverse = scale_and_quantize(torch.zeros(0, 3), E4M3)
    assert payload.shape == (0, 3)
    assert inverse == 1


def test_storing_again_under_another_power_of_two_is_exact():
    values = torch.randn(1000)
    values = values[values.abs() > 0.1]  # normal numbers under both scales
    payload, inverse = scale_and_quantize(values, E4M3)
    once = dequantize(payload, inverse)
    again = dequantize(*scale_and_quantize(once, E4M3))
    smaller = dequantize(*scale_and_quantize(once, E4M3, margin=2))
    assert torch.equal(once, again)
    assert torch.equal(once, smaller)


@pytest.mark.parametrize(("number_format", "error"), [(E4M3, 0.04), (E5M2, 0.07), (FP16, 3e-4)])
def test_the_relative_error_is_that_of_the_format(number_format, error):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    stored = dequantize(*scale_and_quantize(values, number_format))
    assert ((stored - values).norm() / values.norm()).item() < error
