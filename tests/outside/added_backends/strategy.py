from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.abc.strategy import Strategy
from nbaccel.plan.launch_plan import Choice


class Averaging(Strategy):
    """Plain data-parallel training."""

    name: ClassVar[str] = "averaging"

    def __init__(self, place: Place, weight: float) -> None:
        super().__init__(place)
        self._weight = weight
        self._parameters: list[nn.Parameter] = []

    @classmethod
    def build(cls, place: Place, settings: Any, *, precision: Any, asked: Any) -> Averaging:
        return cls(place, settings.weight)

    def wrap(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            self._parameters += model.parameters()
        self.choices += (Choice("weight", str(self._weight), "from its settings"),)
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        super().backward(loss, sync=sync, **options)
        for parameter in self._parameters if sync else ():
            dist.all_reduce(parameter.grad)
            parameter.grad *= self._weight / self.place.world_size
