from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from nbaccel.abc.precision import Precision


class Bead16(Precision):
    """bfloat16 by torch's autocast."""

    name: ClassVar[str] = "bead16"
    dtype = torch.bfloat16

    def wrap_forward(self, model: nn.Module) -> None:
        forward = model.forward

        def computed(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                return forward(*args, **kwargs).float()

        model.__dict__["forward"] = computed

    def unwrap_forward(self, model: nn.Module) -> None:
        model.__dict__.pop("forward", None)

    def autocast(self, settings: Any = None) -> AbstractContextManager[None]:
        return torch.autocast("cpu", torch.bfloat16)
