from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.precision import Precision, PrecisionSettings


class Rounded(nn.Linear):
    """A linear layer whose weight is rounded to 8 bits in the forward pass."""

    margin = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scale = 2.0**self.margin
        short = (self.weight / scale).to(torch.float8_e4m3fn).to(self.weight.dtype) * scale
        rounded = self.weight + (short - self.weight).detach()
        return nn.functional.linear(values, rounded, self.bias)


class Bead8(Precision):
    """Linear layers become `Rounded` ones; their parameters stay the same objects."""

    name: ClassVar[str] = "fp8"

    def __init__(self, margin: int) -> None:
        self._margin = margin

    @classmethod
    def build(cls, settings: PrecisionSettings) -> Bead8:
        return cls(settings.fp8.margin if settings.fp8 is not None else 0)

    def convert(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            for name, layer in [*model.named_modules()]:
                if type(layer) is nn.Linear:
                    _replace(model, name, self._rounded(layer))
        return bundle

    def _rounded(self, layer: nn.Linear) -> Rounded:
        made = Rounded(1, 1)
        made.weight, made.bias, made.margin = layer.weight, layer.bias, self._margin
        return made


def _replace(model: nn.Module, name: str, layer: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
