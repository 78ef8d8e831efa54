"""Matrix products of payloads of 8 bits: by the device's kernel, or emulated.

The kernel takes matrices whose inner sizes are divisible by 16; others are padded with zeros, which
add nothing. Where there is no kernel, payloads are multiplied in bfloat16 or float32, in which each
of them is exact: the result is the kernel's, but for the order of the sum.
"""

from __future__ import annotations

import torch
from torch import nn

from nbaccel.base import torch_private

MULTIPLE = 16
"""What inner sizes must be divisible by, on GPUs."""


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
    left, right, num_columns = _padded(left, right)
    product = torch_private.multiply_scaled(
        left.contiguous(),
        right.contiguous().t(),
        left_inverse,
        right_inverse,
        dtype,
        fast_accumulation=fast_accumulation,
    )
    return product if product.shape[1] == num_columns else product[:, :num_columns].contiguous()


def _padded(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both with zeros where a size is not divisible by 16, and the columns of the true result."""
    missing_inner = -left.shape[1] % MULTIPLE
    missing_columns = -right.shape[0] % MULTIPLE
    num_columns = right.shape[0]
    if missing_inner:
        left = nn.functional.pad(left, (0, missing_inner))
    if missing_inner or missing_columns:
        right = nn.functional.pad(right, (0, missing_inner, 0, missing_columns))
    return left, right, num_columns
