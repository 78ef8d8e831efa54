"""Products of 8 bits on GPUs that have them, and what MS-AMP's levels hold there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, notebook_launcher
from nbaccel.base.optional_packages import is_installed
from nbaccel.precision.fp8.linear import scaled_product
from nbaccel.precision.fp8.scaled_tensor import E4M3, E5M2, scale_and_quantize
from nbaccel.utils import FP8RecipeKwargs
from tests.isolation import isolated

pytestmark = pytest.mark.gpu

BACKENDS = [
    {"backend": "native"},
    {"backend": "native", "recipe": "delayed", "amax_history_len": 16},
    {"backend": "ao"},
    {"backend": "ao", "recipe": "rowwise"},
    {"backend": "msamp", "opt_level": "O1"},
    {"backend": "msamp", "opt_level": "O2"},
    {"backend": "te"},
    {"backend": "te", "recipe": "current"},
]
PACKAGES = {"ao": "torchao", "te": "transformer_engine"}


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of 8 bits")


@isolated(timeout_s=180)
def test_the_kernel_gives_what_its_emulation_does():
    needs_fp8()
    generator = torch.Generator(device="cuda").manual_seed(0)
    for rows, inner, columns in ((64, 256, 128), (7, 48, 16), (33, 100, 20)):
        left = torch.randn(rows, inner, device="cuda", generator=generator)
        right = torch.randn(columns, inner, device="cuda", generator=generator)
        for left_format in (E4M3, E5M2):
            one, one_inverse = scale_and_quantize(left, left_format)
            other, other_inverse = scale_and_quantize(right, E4M3)
            inverses = (one_inverse, other_inverse)
            for dtype in (torch.float32, torch.bfloat16):
                found, wanted = (
                    scaled_product(one, other, inverses, dtype, emulate=emulate)
                    for emulate in (False, True)
                )
                assert found.shape == (rows, columns)
                assert torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=5e-2)


def train(fp8: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    settings: dict[str, Any] = (
        {"mixed_precision": "bf16"}
        if fp8 is None
        else {"mixed_precision": "fp8", "kwargs_handlers": [FP8RecipeKwargs(**fp8)]}
    )
    accelerator = Accelerator(**settings)
    width = 2048
    layers = [nn.Linear(width, width, bias=False) for _ in range(8)]
    model: Any = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(256, width, device=accelerator.device)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.synchronize()
    del loss
    # Some 60 MiB, whatever the model: they are no level's.
    torch._C._cuda_clearCublasWorkspaces()
    return {
        "losses": losses,
        "bytes": torch.cuda.memory_allocated() / (8 * width * width),
        "warnings": accelerator.plan.warnings,
        "backend": accelerator.fp8_backend,
    }


@pytest.mark.parametrize("fp8", BACKENDS, ids=lambda fp8: "-".join(map(str, fp8.values())))
def test_every_backend_trains_and_levels_hold_less(fp8):
    package = PACKAGES.get(fp8["backend"], "")
    if package and not is_installed(package):
        pytest.skip(f"{package} is not installed")
    (plain,) = notebook_launcher(train, (None,), num_processes=1, start_method="template")
    (short,) = notebook_launcher(train, (fp8,), num_processes=1, start_method="template")
    assert short["backend"] == fp8["backend"]
    assert short["losses"][-1] < 1.1 * plain["losses"][-1] + 0.05
    if fp8.get("opt_level") == "O1":
        assert short["bytes"] < 11.5 < plain["bytes"]
    if fp8.get("opt_level") == "O2":
        assert short["bytes"] < 6.5 < plain["bytes"]
