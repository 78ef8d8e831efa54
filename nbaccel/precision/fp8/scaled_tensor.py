"""Short number formats, their scales, and ``ScaledTensor``: float32 outside, stored in them.

A tensor ``x`` is stored as a *payload* ``cast(x * scale)`` and as ``inverse_scale = 1 / scale``, so
that ``payload * inverse_scale`` is ``x`` again, rounded. Scales are powers of two: multiplying by
one is exact, and so is storing a payload again under another scale (as long as it does not become
subnormal). The scale of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433),
section 4, is ``maximum / amax``; a power of two costs at most one bit of the range.

Weights, gradients and moments of MS-AMP's levels are `ScaledTensor`s (FP8-LM, arXiv 2310.18313,
section 2). To torch each is a float32 tensor of its shape:

    read       any operation gets the values as float32
    write      an operation that writes is done in float32; the result is stored under a new scale
    multiply   by one number changes the scale alone: exact, whatever the format

[Note: infinite values] torch's cast to E4M3 saturates: an infinite gradient would become 448, and
nobody would notice. So an infinite or undefined largest magnitude makes every element NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbaccel.base import torch_private
from nbaccel.base.trees import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

# Beyond it a scale is infinite in float32.
_LARGEST_EXPONENT = 126.0
# Rounding again and again adds up: 16 % after 64 additions in E4M3 (facts of the benchmark fp8.py).
_MOST_FP8_ADDITIONS = 8


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format of 8 or 16 bits."""

    name: str  # as in papers
    dtype: torch.dtype  # torch's name of it

    @property
    def maximum(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.dtype).max

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """Round values that are in range."""
        return values.clamp(-self.maximum, self.maximum).to(self.dtype)  # NaN passes


E4M3 = NumberFormat("E4M3", torch.float8_e4m3fn)
E5M2 = NumberFormat("E5M2", torch.float8_e5m2)
FP16 = NumberFormat("FP16", torch.float16)
BF16 = NumberFormat("BF16", torch.bfloat16)


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
    values: torch.Tensor, number_format: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a tensor under the scale that its own largest magnitude gives (current scaling)."""
    scale = power_of_two_scale(largest_magnitude(values), number_format)
    return quantize(values, scale, number_format), scale.reciprocal()


def dequantize(payload: torch.Tensor, inverse_scale: torch.Tensor) -> torch.Tensor:
    """The values that a payload stands for."""
    return payload.to(torch.float32) * inverse_scale


_aten = torch.ops.aten
_MULTIPLICATIONS = (_aten.mul_.Tensor, _aten.mul_.Scalar)
_DIVISIONS = (_aten.div_.Tensor, _aten.div_.Scalar)
_FORMATS = {number_format.dtype: number_format for number_format in (E4M3, E5M2, FP16, BF16)}


class ScaledTensor(torch.Tensor):
    """A float32 tensor that is stored in a short format under one scale."""

    payload: torch.Tensor
    inverse_scale: torch.Tensor

    @staticmethod
    def __new__(
        cls, payload: torch.Tensor, inverse_scale: torch.Tensor, requires_grad: bool = False
    ) -> Self:
        """A tensor of the payload's shape without a storage of its own."""
        wrapper: Self = torch_private.make_wrapper_tensor(
            cls, payload, torch.float32, requires_grad=requires_grad
        )
        return wrapper

    def __init__(
        self, payload: torch.Tensor, inverse_scale: torch.Tensor, requires_grad: bool = False
    ) -> None:
        self.payload = payload
        self.inverse_scale = inverse_scale

    @classmethod
    def of(cls, values: torch.Tensor, number_format: NumberFormat) -> ScaledTensor:
        """Store values in a format, under the scale that fits them."""
        payload, scale = scale_and_quantize(values.detach().contiguous(), number_format)
        return cls(payload, scale)

    @property
    def number_format(self) -> NumberFormat:
        """The format of the payload."""
        return _FORMATS[self.payload.dtype]

    @property
    def stored_bytes(self) -> int:
        """What payload and scale take."""
        return self.payload.nbytes + self.inverse_scale.nbytes

    def dequantize(self) -> torch.Tensor:
        """The values: float32, of this shape; a plain tensor of its own."""
        return dequantize(self.payload, self.inverse_scale)

    def store(self, values: torch.Tensor) -> None:
        """Take other values, in the same format, under the scale that fits them."""
        payload, scale = scale_and_quantize(values.to(self.payload.device), self.number_format)
        self.payload.copy_(payload)
        self.inverse_scale.copy_(scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload", "inverse_scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], meta: Any, size: Any, stride: Any
    ) -> ScaledTensor:
        return cls(inner["payload"], inner["inverse_scale"])

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return (
            f"ScaledTensor({self.number_format.name}, shape={tuple(self.shape)}, "
            f"inverse_scale={self.inverse_scale.item():g})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own way looks for a storage, which a wrapper does not have.
        return type(self), (self.payload, self.inverse_scale, self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch; see the module."""
        options = dict(kwargs or {})
        way = _OWN_WAYS.get(func)
        if way is not None:
            result = way(func, *args, **options)
            if result is not NotImplemented:
                return result
        plain_args = map_tensors(values_of, tuple(args))
        plain_options = map_tensors(values_of, options)
        result = func(*plain_args, **plain_options)
        for position, name in torch_private.written_arguments(func):
            if position < len(args):
                written = _scaled_pairs(args[position], plain_args[position])
            else:
                written = _scaled_pairs(options.get(name), plain_options.get(name))
            for stored_tensor, plain_tensor in written:
                stored_tensor.store(plain_tensor)
                # An operation in place returns its argument.
                result = stored_tensor if result is plain_tensor else result
        return result


def values_of(leaf: Any) -> Any:
    """The values of a stored tensor; anything else as it is."""
    return leaf.dequantize() if isinstance(leaf, ScaledTensor) else leaf


def _scaled_pairs(stored: Any, plain: Any) -> Iterator[tuple[ScaledTensor, torch.Tensor]]:
    # Operations on many tensors (`_foreach_mul_`) write lists.
    if not isinstance(stored, (list, tuple)):
        stored, plain = [stored], [plain]
    for stored_item, plain_item in zip(stored, plain, strict=True):
        if isinstance(stored_item, ScaledTensor):
            yield stored_item, plain_item


def _detach(func: Any, tensor: ScaledTensor) -> ScaledTensor:
    # The same payload: what is written through a detached tensor is written to this one.
    return ScaledTensor(tensor.payload, tensor.inverse_scale)


def _clone(func: Any, tensor: ScaledTensor, **options: Any) -> ScaledTensor:
    return ScaledTensor(tensor.payload.clone(), tensor.inverse_scale.clone())


def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, ScaledTensor):
        return NotImplemented
    if isinstance(source, ScaledTensor) and source.payload.dtype == target.payload.dtype:
        target.payload.copy_(source.payload, non_blocking)
        target.inverse_scale.copy_(source.inverse_scale, non_blocking)
    else:
        target.store(values_of(source))
    return target


def _zero(func: Any, tensor: ScaledTensor) -> ScaledTensor:
    tensor.payload.zero_()
    tensor.inverse_scale.fill_(1.0)
    return tensor


def _multiply(func: Any, tensor: Any, factor: Any) -> Any:
    """Multiply or divide in place by one number: the payload stays."""
    is_one_number = not isinstance(factor, torch.Tensor) or (
        factor.dim() == 0 and not isinstance(factor, ScaledTensor)
    )
    if not isinstance(tensor, ScaledTensor) or not is_one_number:
        return NotImplemented
    if func in _DIVISIONS:
        tensor.inverse_scale.div_(factor)
    else:
        tensor.inverse_scale.mul_(factor)
    return tensor


def _to(func: Any, tensor: Any, *args: Any, **options: Any) -> Any:
    """Move to another device in the short format; to another dtype as plain values."""
    dtype = options.get("dtype")
    device = options.get("device")
    if not isinstance(tensor, ScaledTensor) or dtype not in (None, torch.float32) or not device:
        return NotImplemented
    return ScaledTensor(tensor.payload.to(device), tensor.inverse_scale.to(device))


_OWN_WAYS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
    torch_private.COPIES_TO_DEVICE: _to,
    **dict.fromkeys((*_MULTIPLICATIONS, *_DIVISIONS), _multiply),
}
