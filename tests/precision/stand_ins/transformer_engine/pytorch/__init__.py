from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SEEN: list[dict[str, Any]] = []
"""What each forward under `autocast` was told."""


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        # Without a bias it has an empty tensor, as TransformerEngine's own.
        size = out_features if bias else 0
        self.bias = nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.bias.numel() else None
        return nn.functional.linear(values, self.weight, bias)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(values, self.weight.shape, self.weight, self.bias, self.eps)


@contextlib.contextmanager
def autocast(*, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
    SEEN.append({"enabled": enabled, "recipe": recipe, "group": amax_reduction_group})
    yield
