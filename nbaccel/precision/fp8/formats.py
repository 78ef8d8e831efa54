"""Short number formats, and the scales that bring values into their range.

A tensor ``x`` is stored as a *payload* ``cast(x * scale)`` and as ``inverse_scale = 1 / scale``, so
that ``payload * inverse_scale`` is ``x`` again, rounded. Scales are powers of two: multiplying by
one is exact, and so is storing a payload again under another scale (as long as it does not become
subnormal). The scale of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433),
section 4, is ``maximum / amax``; a power of two costs at most one bit of the range.

[Note: infinite values] torch's cast to E4M3 saturates: an infinite gradient would become 448, and
nobody would notice. So an infinite or undefined largest magnitude gives a scale under which every
element becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# torch has no 8-bit dtype there, so values are rounded by arithmetic and kept as float16.
_WITHOUT_FLOAT8 = frozenset({"mps"})
# Beyond it a scale is infinite in float32.
_LARGEST_EXPONENT = 126.0
# Rounding again and again adds up: 16 % after 64 additions in E4M3 (facts of the benchmark fp8.py).
_MOST_FP8_ADDITIONS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberFormat:
    """A number format of 8 or 16 bits."""

    name: str  # as in papers
    dtype: torch.dtype  # torch's name of it
    maximum: float  # the largest finite value
    smallest_exponent: int  # of normal numbers, as a power of two
    mantissa_bits: int  # stored bits of the mantissa

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """Round values that are in range."""
        in_range = values.clamp(-self.maximum, self.maximum)  # NaN passes
        if self.dtype.itemsize == 1 and values.device.type in _WITHOUT_FLOAT8:
            return self.rounded(in_range).to(torch.float16)
        return in_range.to(self.dtype)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What a cast to this format and back gives, by arithmetic alone."""
        values = values.float()
        # frexp gives a mantissa in [0.5, 1), so its exponent is one more than that of the format.
        exponents = (torch.frexp(values).exponent - 1).clamp(min=self.smallest_exponent)
        spacing = torch.ldexp(torch.ones_like(values), exponents - self.mantissa_bits)
        return torch.round(values / spacing) * spacing  # halves to even, as the cast does


E4M3 = NumberFormat(
    name="E4M3",
    dtype=torch.float8_e4m3fn,
    maximum=448.0,
    smallest_exponent=-6,
    mantissa_bits=3,
)
E5M2 = NumberFormat(
    name="E5M2",
    dtype=torch.float8_e5m2,
    maximum=57344.0,
    smallest_exponent=-14,
    mantissa_bits=2,
)
FP16 = NumberFormat(
    name="FP16",
    dtype=torch.float16,
    maximum=65504.0,
    smallest_exponent=-14,
    mantissa_bits=10,
)
BF16 = NumberFormat(
    name="BF16",
    dtype=torch.bfloat16,
    maximum=torch.finfo(torch.bfloat16).max,
    smallest_exponent=-126,
    mantissa_bits=7,
)


def accumulation_format(accumulation_steps: int) -> NumberFormat:
    """The format in which weight gradients of MS-AMP's levels are kept."""
    return E4M3 if accumulation_steps <= _MOST_FP8_ADDITIONS else BF16


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """The largest absolute value."""
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=values.device)
    return values.abs().amax().float()


def power_of_two_scale(
    amax: torch.Tensor, number_format: NumberFormat, margin: int = 0
) -> torch.Tensor:
    """The largest power of two by which values can be multiplied without leaving a format."""
    exponent = torch.floor(torch.log2(number_format.maximum / amax)) - margin
    scale = torch.exp2(exponent.clamp(max=_LARGEST_EXPONENT))
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def quantize(
    values: torch.Tensor, scale: torch.Tensor, number_format: NumberFormat
) -> torch.Tensor:
    """The payload of values under a scale."""
    return number_format.cast(values.float() * scale)


def scale_and_quantize(
    values: torch.Tensor, number_format: NumberFormat, margin: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a tensor under the scale that its own largest magnitude gives (current scaling)."""
    scale = power_of_two_scale(largest_magnitude(values), number_format, margin)
    return quantize(values, scale, number_format), scale.reciprocal()


def dequantize(
    payload: torch.Tensor, inverse_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values that a payload stands for."""
    return (payload.to(torch.float32) * inverse_scale).to(dtype)
