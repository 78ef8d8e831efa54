"""The real Accelerate reads checkpoints that nbaccel wrote, and nbaccel those of Accelerate."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.train.checkpoint import load_state, save_model, save_state
from tests.isolation import isolated
from tests.train.checkpoint.training import ALONE, Training

pytestmark = pytest.mark.timeout(300)  # a cold import of Accelerate takes its time

SAFE = pytest.mark.parametrize("safe", [True, False])


def prepared(training: Training) -> Any:
    """Accelerate's object, with the parts of a training."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(training.model, training.optimizer, training.scheduler)
    accelerator.register_for_checkpointing(training.counter)
    return accelerator


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def trained() -> Training:
    training = Training(seed=0)
    training.loaders.clear()
    seeded(3)
    for _ in range(3):
        one_step(training)
    return training


def one_step(training: Training) -> float:
    loss = training.model(torch.randn(3, 4)).pow(2).mean()
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()
    training.counter.value += 1
    return loss.item()


def fresh() -> Training:
    training = Training(seed=9)
    training.loaders.clear()
    return training


@isolated(timeout_s=200)
@SAFE
def test_accelerate_goes_on_from_a_checkpoint_of_nbaccel(tmp_path, safe):
    first = trained()
    save_state(
        tmp_path / "c", first.parts, ALONE, first.collectives, step=5, safe_serialization=safe
    )
    saved = first.state()
    unbroken = [one_step(first), *draws()]

    second = fresh()
    accelerator = prepared(second)
    accelerator.load_state(str(tmp_path / "c"))
    assert accelerator.step == 5
    assert second.state() == saved
    assert [one_step(second), *draws()] == unbroken


@isolated(timeout_s=200)
@SAFE
def test_nbaccel_goes_on_from_a_checkpoint_of_accelerate(tmp_path, safe):
    first = trained()
    accelerator = prepared(first)
    accelerator.step = 5
    accelerator.save_state(str(tmp_path / "c"), safe_serialization=safe)
    saved = first.state()
    unbroken = [one_step(first), *draws()]

    second = fresh()
    assert load_state(tmp_path / "c", second.parts, ALONE, second.collectives) == 5
    assert second.state() == saved
    assert [one_step(second), *draws()] == unbroken


@isolated(timeout_s=200)
def test_both_write_the_same_files(tmp_path):
    training = trained()
    save_state(tmp_path / "ours", training.parts, ALONE, training.collectives, step=0)
    prepared(training).save_state(str(tmp_path / "theirs"))
    ours, theirs = (
        sorted(path.name for path in (tmp_path / whose).iterdir()) for whose in ("ours", "theirs")
    )
    assert ours == theirs


@isolated(timeout_s=200)
@SAFE
@pytest.mark.parametrize("limit", ["10GB", 100])
def test_accelerate_loads_a_model_that_nbaccel_cut_into_files(tmp_path, safe, limit):
    from accelerate import load_checkpoint_in_model

    first, second = trained().model, fresh().model
    save_model(first.state_dict(), tmp_path, max_shard_size=limit, safe_serialization=safe)
    load_checkpoint_in_model(second, str(tmp_path))
    for name, value in first.state_dict().items():
        assert second.state_dict()[name].equal(value), name
