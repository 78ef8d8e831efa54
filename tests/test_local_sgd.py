from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import Accelerator, FullyShardedDataParallelPlugin
from nbaccel.local_sgd import LocalSGD
from tests.accelerator.loops import line, sgd, together, told, weight


def train(accelerator: Accelerator, steps: int, every: int, **options: Any) -> list[float]:
    """The weight after each step; each process pulls it down by its number plus 1."""
    model = line(0.0)
    model, optimizer = accelerator.prepare(model, sgd(model, 1.0))
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, **options) as local:
        for _ in range(steps):
            loss = model(torch.ones(1, 1)).sum() * (accelerator.process_index + 1)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(weight(model))
    return [*seen, weight(model)]


def test_weights_drift_apart_and_are_averaged_every_few_steps_and_at_the_end() -> None:
    one, two = together(lambda accelerator: train(accelerator, 3, 2))
    assert one == [-1.0, -3.0, -4.0, -4.5]
    assert two == [-2.0, -3.0, -5.0, -4.5]

    def body(accelerator: Accelerator) -> list[float]:
        return train(accelerator, 2, 8, enabled=False)

    assert together(body) == [[-1.5, -3.0, -3.0]] * 2


def test_an_error_in_the_block_is_not_waited_for() -> None:
    def body(accelerator: Accelerator) -> str:
        model = accelerator.prepare(line())

        def fail() -> None:
            with LocalSGD(accelerator, model, 2):
                raise KeyError("mine")

        found = told(fail)
        assert model.require_backward_grad_sync
        return found

    assert together(body) == ["KeyError: 'mine'"] * 2


def test_what_cannot_be_is_refused() -> None:
    def body(accelerator: Accelerator) -> str:
        return told(lambda: LocalSGD(accelerator, line(), 2))

    found = together(body, fsdp_plugin=FullyShardedDataParallelPlugin())
    assert all("LocalSGD cannot go with strategy 'fsdp'" in text for text in found)
    with pytest.raises(ValueError, match=r"local_sgd_steps=0\) must be at least 1"):
        LocalSGD(Accelerator(cpu=True), line(), 0)
