from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, AutocastKwargs
from nbaccel.errors import UserMistake
from tests.accelerator.loops import line


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_and_the_context_compute_in_the_precision(precision: str, dtype: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    seen: list[torch.dtype] = []
    inner = nn.Linear(2, 2)
    inner.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    model = accelerator.prepare(nn.Sequential(inner))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [dtype or torch.float32]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert accelerator.native_amp is (dtype is not None)
    assert (accelerator.scaler is not None) is (precision == "fp16")


def test_the_context_can_be_switched_off_by_its_own_settings() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_autocast_is_as_the_handler_says() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)]
    )
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    seen: list[torch.dtype] = []
    inner = line()
    inner.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    accelerator.prepare(nn.Sequential(inner))(torch.ones(1, 1))
    assert seen == [torch.float32]


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_that_was_not_scaled_is_told_with_the_way_out(clips: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()

    def finish() -> None:
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with pytest.raises(UserMistake, match=r"Write accelerator\.backward\(loss\) in place of loss"):
        finish()
