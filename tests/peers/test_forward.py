"""What a model's forward computes and returns beside Accelerate's, in the same format."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.precision.native import Bf16


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"raw": y, "pair": (self.norm(y), [y.double(), y.argmax(-1), "word", None])}


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return flat(list(tree.values()))
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flat(item)]
    return [(tree.dtype, tree.tolist()) if isinstance(tree, torch.Tensor) else tree]


def test_bfloat16_gives_the_digits_and_dtypes_of_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.manual_seed(0)
    model, x = Nested(), torch.randn(5, 4)
    try:
        theirs = flat(Accelerator(cpu=True, mixed_precision="bf16").prepare(model)(x))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    own = Nested()
    own.load_state_dict(model.state_dict())
    Bf16(torch.device("cpu"), AutocastKwargs(), GradScalerKwargs()).wrap_forward(own)
    assert flat(own(x)) == theirs
