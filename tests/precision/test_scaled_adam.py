from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.errors import ConfigError
from nbaccel.precision.fp8.scaled_adam import ScaledAdam
from nbaccel.precision.fp8.scaled_tensor import E4M3, FP16, ScaledTensor

CLASSES = pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])


def pair(optimizer_class: Any, **options: Any) -> tuple[nn.Parameter, Any, nn.Parameter, Any]:
    """A weight and its optimizer in float32, and the same stored short."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=generator)
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    plain = nn.Parameter(values.clone())
    stored = nn.Parameter(ScaledTensor.of(values, FP16))
    return (
        plain,
        optimizer_class([plain], **options),
        stored,
        ScaledAdam(optimizer_class([stored], **options)),
    )


def gradients(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(64, 64, generator=generator)
    return [common + torch.randn(64, 64, generator=generator) for _ in range(count)]


@CLASSES
@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.95)}], ids=str)
def test_it_steps_like_torchs_with_the_error_of_8_bits(optimizer_class, options):
    plain, optimizer, stored, scaled = pair(optimizer_class, **options)
    start = plain.detach().clone()
    for gradient in gradients(40):
        plain.grad, stored.grad = gradient, ScaledTensor.of(gradient, E4M3)
        optimizer.step()
        scaled.step()
    moved = (plain - start).norm()
    assert ((stored.detach().dequantize() - plain).norm() / moved).item() < 0.03


def test_it_follows_a_schedule_and_goes_on_from_a_file_bit_by_bit():
    _, _, stored, scaled = pair(torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.StepLR(scaled.given, 1, gamma=0.5)
    stored.grad = ScaledTensor.of(gradients(1)[0], E4M3)
    scaled.step()  # with warnings as errors: the schedule must know of the step
    schedule.step()
    assert scaled.param_groups[0]["lr"] == pytest.approx(5e-3)
    scaled.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(scaled.param_groups) == 2
    _, _, stored, scaled = pair(torch.optim.AdamW)
    for gradient in gradients(5):
        stored.grad = ScaledTensor.of(gradient, E4M3)
        scaled.step()
    file = io.BytesIO()
    torch.save(scaled.state_dict(), file)
    file.seek(0)
    twin = nn.Parameter(stored.detach().clone())
    other = ScaledAdam(torch.optim.AdamW([twin], lr=5.0))
    other.load_state_dict(torch.load(file, weights_only=True))  # plain tensors: no class of ours
    for gradient in gradients(3, seed=7):
        stored.grad, twin.grad = (ScaledTensor.of(gradient, E4M3) for _ in range(2))
        scaled.step()
        other.step()
    assert torch.equal(stored.detach().dequantize(), twin.detach().dequantize())


def test_other_optimizers_are_refused_with_the_level_that_takes_them():
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"this optimizer is SGD.*AdamW or Adam.*O1"):
        ScaledAdam(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(ConfigError, match=r"AdamW\(amsgrad=True\) keeps a third"):
        ScaledAdam(torch.optim.AdamW([weight], amsgrad=True))
