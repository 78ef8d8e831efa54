"""Accelerate's guide to low-precision training: its code cells, with the package's name changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.errors import ConfigError
from nbaccel.precision.fp8.scaled_adam import ScaledAdam
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor

CELL_1 = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp8")
"""
CELL_2 = """
from accelerate import Accelerator
from accelerate.utils import FP8RecipeKwargs
kwargs = [FP8RecipeKwargs(backend="msamp")]
# أو لتحديد الخلفية كـ `TransformersEngine` حتى إذا تم تثبيت MS-AMP
# kwargs = [FP8RecipeKwargs(backend="te")]
accelerator = Accelerator(mixed_precision="fp8", kwarg_handlers=kwargs)
"""
CELL_3 = """
from accelerate import Accelerator
from accelerate.utils import FP8RecipeKwargs
kwargs = [FP8RecipeKwargs(backend="msamp", optimization_level="O2")]
accelerator = Accelerator(mixed_precision="fp8", kwarg_handlers=kwargs)
"""
CELL_4 = """
from accelerate import Accelerator
from accelerate.utils import FP8RecipeKwargs
kwargs = [FP8RecipeKwargs(backend="te", ...)]
accelerator = Accelerator(mixed_precision="fp8", kwarg_handlers=kwargs)
"""


def run(cell: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(re.sub(r"\baccelerate\b", "nbaccel", cell), names)
    return names


def trains(names: dict[str, Any]) -> tuple[nn.Module, Any, list[float]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = names["accelerator"].prepare(model, optimizer)
    inputs = torch.randn(64, 32, device=names["accelerator"].device)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - inputs).square().mean()
        names["accelerator"].backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def test_cell_1_takes_what_is_installed_and_trains():
    names = run(CELL_1)
    assert names["accelerator"].mixed_precision == "fp8"
    _, _, losses = trains(names)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [CELL_2, CELL_3], ids=["cell 2", "cell 3"])
def test_cells_2_and_3_keep_the_optimizer_in_8_and_16_bits(cell):
    names = run(cell)
    assert names["accelerator"].fp8_backend == "msamp"
    model, optimizer, losses = trains(names)
    assert losses[-1] < 0.6 * losses[0]
    assert isinstance(optimizer.optimizer, ScaledAdam)
    assert isinstance(model[2].weight, ScaledTensor)


def test_cell_4_is_no_python_and_without_its_dots_says_what_is_missing():
    with pytest.raises(SyntaxError):
        run(CELL_4)
    if torch.cuda.is_available():
        pytest.skip("TransformerEngine may be there")
    with pytest.raises(ConfigError, match=r"'te' needs transformer_engine|not supported on cpu"):
        run(CELL_4.replace(", ...", ""))
