"""``Fp8Linear``: a linear layer whose three matrix products are computed in 8 bits.

    forward           output          = input · weightᵀ       E4M3 · E4M3
    backward          input gradient  = gradient · weight     E5M2 · E4M3
                      weight gradient = gradientᵀ · input     E5M2 · E4M3

A layer is converted by changing the class of the user's own `nn.Linear`, so module, parameters and
hooks stay the same objects: optimizers, tied weights, shared memory and what wraps the model later
need not know. The backward pass needs payloads of input and weight alone, of one byte each.

The device's kernel takes matrices whose inner sizes are divisible by 16; others are padded with
zeros, which add nothing. Where there is no kernel, payloads are multiplied in bfloat16 or float32,
in which each of them is exact: the result is the kernel's, but for the order of the sum.

[Note: delayed scaling] Delayed scaling (Micikevicius et al., arXiv 2209.05433; the knobs are
TransformerEngine's) casts a tensor with a scale that is known before the tensor is, so that it is
read once. Magnitudes are collected while a step computes, and become scales after it, the same on
all processes. A scale that is too small costs nearly nothing, since FP8 is a floating-point format;
one that is too large cuts values off. So a layer without history takes the tensor's own scale.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.precision.fp8.scaled_tensor import (
    E4M3,
    E5M2,
    NumberFormat,
    ScaledTensor,
    largest_magnitude,
    power_of_two_scale,
    quantize,
    values_of,
)

INPUT = 0
WEIGHT = 1
GRADIENT = 2


@dataclass(eq=False)
class AmaxHistory:
    """Magnitudes and scales of all layers of a model; see [Note: delayed scaling]."""

    _names: list[str]  # of the layers
    _formats: tuple[NumberFormat, NumberFormat, NumberFormat]  # of inputs, weights and gradients
    _: KW_ONLY
    length: int  # steps that are remembered
    margin: int  # headroom of scales, in powers of two
    interval: int  # steps between two computations of scales
    takes_latest: bool  # whether the last magnitude decides, not the largest that is remembered
    device: torch.device

    def __post_init__(self) -> None:
        self._step = 0
        self._history = torch.zeros(self.length, 3, len(self._names), device=self.device)
        # Magnitudes of the step at hand; a scale is 0 where there is no history.
        self.amaxes = torch.zeros(3, len(self._names), device=self.device)
        self.scales = torch.zeros(3, len(self._names), device=self.device)

    @torch.no_grad()
    def update(self) -> None:
        """Take the magnitudes of the step into account; a collective in a process group."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.amaxes, dist.ReduceOp.MAX)
        row = torch.where(torch.isfinite(self.amaxes), self.amaxes, 0.0)
        self._history[self._step % self.length] = row
        self._step += 1
        if self._step % self.interval == 0:
            deciding = row if self.takes_latest else self._history.amax(dim=0)
            for kind, number_format in enumerate(self._formats):
                new_scales = power_of_two_scale(deciding[kind], number_format, self.margin)
                # A layer that did not take part keeps its scale.
                self.scales[kind] = torch.where(deciding[kind] > 0, new_scales, self.scales[kind])
        self.amaxes.zero_()

    def state_dict(self) -> dict[str, Any]:
        """History and scales, to continue with the same."""
        return {
            "layers": self._names,
            "step": self._step,
            "history": self._history.clone(),
            "scales": self.scales.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        if state["layers"] != self._names or state["history"].shape != self._history.shape:
            raise ConfigError(
                f"The saved scales of fp8 are those of {len(state['layers'])} layers over "
                f"{len(state['history'])} steps; this model has {len(self._names)} over "
                f"{len(self._history)}. They would belong to other tensors. Prepare the model with "
                "the settings that it was saved with, or delete the file with the scales."
            )
        self._step = int(state["step"])
        self._history.copy_(state["history"])
        self.scales.copy_(state["scales"])
        self.amaxes.zero_()


MULTIPLE = 16  # what inner sizes must be divisible by, on GPUs


def scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    inverse_scale: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    emulate: bool,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``left @ right.T`` of two payloads."""
    left_inverse, right_inverse = inverse_scale
    if emulate:
        product = left.to(dtype) @ right.to(dtype).t()
        return product * (left_inverse * right_inverse).to(dtype)  # exact: powers of two
    missing_inner = -left.shape[1] % MULTIPLE
    num_columns = right.shape[0]
    if missing_inner:
        left = nn.functional.pad(left, (0, missing_inner))
    if missing_inner or num_columns % MULTIPLE:
        right = nn.functional.pad(right, (0, missing_inner, 0, -num_columns % MULTIPLE))
    product = torch_private.multiply_scaled(
        left.contiguous(),
        right.contiguous().t(),
        left_inverse,
        right_inverse,
        dtype,
        fast_accumulation=fast_accumulation,
    )
    return product if product.shape[1] == num_columns else product[:, :num_columns].contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecipe:
    """How a layer computes."""

    emulate: bool  # whether there is no kernel for 8 bits
    gradient_format: NumberFormat = E5M2  # of output gradients; inputs and weights have E4M3
    margin: int = 0  # headroom of scales, in powers of two
    # Whether forward, input gradient and weight gradient are computed in higher precision.
    exact_passes: tuple[bool, bool, bool] = (False, False, False)
    in_evaluation: bool = False  # whether 8 bits are used in evaluation, too
    # The format that weight gradients are kept in, where the weight is a `ScaledTensor`.
    weight_gradients: NumberFormat = E4M3
    # Where delayed scales come from; None: each tensor's own magnitude decides.
    history: AmaxHistory | None = None
    layer_index: int = 0  # the layer's column in it

    def stored(self, values: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload and inverse scale of a tensor."""
        number_format = self.gradient_format if kind == GRADIENT else E4M3
        amax = largest_magnitude(values)
        scale = power_of_two_scale(amax, number_format, self.margin)
        if self.history is not None:
            seen = self.history.amaxes[kind, self.layer_index]
            # A layer may be called several times in a step.
            seen.copy_(torch.maximum(seen, amax))
            known_scale = self.history.scales[kind, self.layer_index]
            # One that is infinite must not be cut: see scaled_tensor, [Note: infinite values].
            usable = (known_scale > 0) & torch.isfinite(amax)
            scale = torch.where(usable, known_scale, scale)
        return quantize(values, scale, number_format), scale.reciprocal()


class _Product(torch.autograd.Function):
    """``values @ weight.T`` in 8 bits, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        recipe: LayerRecipe,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        exact_output, exact_input_gradient, exact_weight_gradient = recipe.exact_passes
        plain_weight: torch.Tensor = values_of(weight)
        input_payload, input_inverse = recipe.stored(values, INPUT)
        weight_payload, weight_inverse = recipe.stored(plain_weight, WEIGHT)
        if exact_output:
            output = values.to(dtype) @ plain_weight.to(dtype).t()
        else:
            output = scaled_product(
                input_payload,
                weight_payload,
                (input_inverse, weight_inverse),
                dtype,
                emulate=recipe.emulate,
                fast_accumulation=True,
            )
        ctx.save_for_backward(
            values if exact_weight_gradient else input_payload,
            weight if exact_input_gradient else weight_payload,
            input_inverse,
            weight_inverse,
        )
        ctx.recipe = recipe
        ctx.dtype = dtype
        ctx.input_dtype = values.dtype
        ctx.weight_dtype = weight.dtype
        ctx.is_scaled = isinstance(weight, ScaledTensor)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        values, weight, input_inverse, weight_inverse = ctx.saved_tensors
        recipe: LayerRecipe = ctx.recipe
        _, exact_input_gradient, exact_weight_gradient = recipe.exact_passes
        payload, inverse = recipe.stored(gradient, GRADIENT)
        multiply = functools.partial(scaled_product, dtype=ctx.dtype, emulate=recipe.emulate)
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            if exact_input_gradient:
                input_gradient = gradient.to(ctx.dtype) @ values_of(weight).to(ctx.dtype)
            else:
                input_gradient = multiply(payload, weight.t(), (inverse, weight_inverse))
            input_gradient = input_gradient.to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            if exact_weight_gradient:
                weight_gradient = gradient.to(ctx.dtype).t() @ values.to(ctx.dtype)
            else:
                weight_gradient = multiply(payload.t(), values.t(), (inverse, input_inverse))
            weight_gradient = (
                ScaledTensor.of(weight_gradient, recipe.weight_gradients)
                if ctx.is_scaled
                else weight_gradient.to(ctx.weight_dtype)
            )
        return input_gradient, weight_gradient, None, None


class Fp8Linear(nn.Linear):
    """`nn.Linear` that computes in 8 bits; made by :func:`convert_layer` alone."""

    fp8_recipe: LayerRecipe

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in autocast's dtype if it is on."""
        if not (self.training or self.fp8_recipe.in_evaluation):
            return nn.functional.linear(values, values_of(self.weight), self.bias)
        device_type = values.device.type
        dtype = values.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        rows = values.reshape(-1, values.shape[-1])
        # Autocast would cast the products' arguments once more.
        with torch.autocast(device_type, enabled=False):
            output: torch.Tensor = _Product.apply(rows, self.weight, self.fp8_recipe, dtype)  # type: ignore[no-untyped-call]
            if self.bias is not None:
                output = output + self.bias.to(dtype)
        return output.view(*values.shape[:-1], output.shape[-1])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # files and other models want plain numbers
            destination[f"{prefix}weight"] = values_of(destination[f"{prefix}weight"])

    def extra_repr(self) -> str:
        """What `repr` shows of the layer."""
        return f"{super().extra_repr()}, fp8"


def convert_layer(layer: nn.Linear, recipe: LayerRecipe) -> None:
    """Let a linear layer compute in 8 bits; in place."""
    layer.__class__ = Fp8Linear
    layer.__dict__["fp8_recipe"] = recipe
