"""Models that are sharded: every process writes its part, or process 0 writes the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import debug_launcher
from nbaccel.abc.bundle import Bundle
from nbaccel.config.handlers import (
    AutocastKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
)
from nbaccel.errors import ConfigError
from nbaccel.precision.native import Fp32
from nbaccel.strategies.fsdp import FsdpStrategy
from nbaccel.train.arrival import arrive
from nbaccel.train.checkpoint import load_state, save_state
from tests.train.checkpoint.training import ALONE, Training

KINDS = pytest.mark.parametrize("in_shards", [True, False])


def sharded(seed: int, *, in_shards: bool) -> Training:
    training = Training(arrive(cpu=True), seed)
    precision = Fp32(training.place.device, AutocastKwargs(), GradScalerKwargs())
    strategy = FsdpStrategy(training.place, FullyShardedDataParallelPlugin(), precision)
    bundle = strategy.wrap(Bundle(models=(training.model,), optimizers=(training.optimizer,)))
    (training.model,) = bundle.models
    (training.optimizer,) = bundle.optimizers
    training.parts = replace(
        training.parts,
        strategy=strategy,
        models=[training.model],
        optimizers=[training.optimizer],
        in_shards=in_shards,
    )
    return training


def whole(training: Training) -> dict[str, Any]:
    """Weights and first moments as process 0 sees them."""
    strategy = training.parts.strategy
    state = strategy.optimizer_state(training.model, training.optimizer)
    weights = {k: v.tolist() for k, v in strategy.model_state(training.model).items()}
    moments = [entry["exp_avg"].tolist() for entry in state.get("state", {}).values()]
    return {"weights": weights, "moments": moments}


def save_sharded(folder: str, in_shards: bool) -> dict[str, Any]:
    training = sharded(0, in_shards=in_shards)
    torch.manual_seed(5)
    training.step(3)
    save_state(folder, training.parts, training.place, training.collectives, step=3)
    return whole(training)


def load_sharded(folder: str) -> dict[str, Any]:
    training = sharded(9, in_shards=True)
    load_state(folder, training.parts, training.place, training.collectives)
    return whole(training)


@KINDS
def test_a_sharded_training_comes_back(tmp_path, in_shards):
    folder = tmp_path / "ckpt"
    saved, _ = debug_launcher(save_sharded, args=(str(folder), in_shards))
    assert (folder / "pytorch_model_fsdp_0").is_dir() == in_shards
    assert (folder / "model.safetensors").is_file() != in_shards
    assert (folder / "optimizer.bin").is_file() != in_shards
    loaded, _ = debug_launcher(load_sharded, args=(str(folder),))
    assert loaded == saved
    by_three, *_ = debug_launcher(load_sharded, args=(str(folder),), num_processes=3)
    assert by_three == saved


def test_a_whole_one_is_read_without_sharding(tmp_path):
    folder = tmp_path / "ckpt"
    saved, _ = debug_launcher(save_sharded, args=(str(folder), False))
    training = Training(seed=9)
    load_state(folder, training.parts, ALONE, training.collectives)
    weights, moments, *_ = training.state()
    assert weights == saved["weights"]
    assert [entry["exp_avg"] for entry in moments] == saved["moments"]


def test_one_in_shards_is_refused_where_nothing_is_sharded(tmp_path):
    folder = tmp_path / "ckpt"
    debug_launcher(save_sharded, args=(str(folder), True))
    training = Training(seed=9)
    before = training.state()
    with pytest.raises(ConfigError, match=r"1 model in shards"):
        load_state(Path(folder), training.parts, ALONE, training.collectives)
    assert training.state() == before
