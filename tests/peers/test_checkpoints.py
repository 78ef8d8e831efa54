"""The real Accelerate reads checkpoints that nbaccel wrote, and nbaccel those of Accelerate."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.train.checkpoint import files, load_state, save_model, save_state
from tests.isolation import isolated
from tests.train.checkpoint.training import ALONE, Training

pytestmark = pytest.mark.slow

SAFE = (True, False)  # walked within one process: each costs a cold import of Accelerate


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


@isolated(timeout_s=800)
def test_accelerate_goes_on_from_a_checkpoint_of_nbaccel(tmp_path):
    for safe in SAFE:
        first, folder = trained(), tmp_path / f"safe-{safe}"
        save_state(folder, first.parts, ALONE, first.collectives, step=5, safe_serialization=safe)
        saved = first.state()
        unbroken = [one_step(first), *draws()]

        second = fresh()
        accelerator = prepared(second)
        accelerator.save_state(str(tmp_path / f"theirs-{safe}"), safe_serialization=safe)
        theirs = {path.name for path in (tmp_path / f"theirs-{safe}").iterdir()}
        assert {path.name for path in folder.iterdir()} == theirs | {files.MANIFEST_FILE}
        accelerator.load_state(str(folder))
        assert accelerator.step == 5, safe
        assert second.state() == saved, safe
        assert [one_step(second), *draws()] == unbroken, safe


@isolated(timeout_s=800)
def test_nbaccel_goes_on_from_a_checkpoint_of_accelerate(tmp_path):
    for safe in SAFE:
        first, folder = trained(), tmp_path / f"safe-{safe}"
        accelerator = prepared(first)
        accelerator.step = 5
        accelerator.save_state(str(folder), safe_serialization=safe)
        saved = first.state()
        unbroken = [one_step(first), *draws()]

        second = fresh()
        assert load_state(folder, second.parts, ALONE, second.collectives) == 5, safe
        assert second.state() == saved, safe
        assert [one_step(second), *draws()] == unbroken, safe


@isolated(timeout_s=800)
def test_accelerate_loads_a_model_that_nbaccel_cut_into_files(tmp_path):
    from accelerate import load_checkpoint_in_model

    for safe, limit in itertools.product(SAFE, ["10GB", 100]):
        first, second = trained().model, fresh().model
        folder = tmp_path / f"safe-{safe}-{limit}"
        folder.mkdir()
        save_model(first.state_dict(), folder, max_shard_size=limit, safe_serialization=safe)
        load_checkpoint_in_model(second, str(folder))
        for name, value in first.state_dict().items():
            assert second.state_dict()[name].equal(value), (safe, limit, name)
