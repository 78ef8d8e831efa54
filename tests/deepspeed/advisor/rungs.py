"""Every rung's configuration, really run: what the workers of the tests do."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import Any

import torch

from nbaccel.base import env
from nbaccel.deepspeed import library
from nbaccel.deepspeed.advise import training_step
from nbaccel.deepspeed.strategy.engines import make_engine
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.strategies.model_blocks import enable_gradient_checkpointing
from tests.deepspeed.advisor.models import WIDTH, Blocks


def step_through(configs: list[tuple[dict[str, Any], bool]]) -> list[tuple[int, bool]]:
    """One optimizer step with each: its stage, and whether the weights have changed."""
    import deepspeed

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    env.update({"PATH": library.path_with_ninja()})
    found = []
    for config, again in configs:
        torch.manual_seed(0)
        model = Blocks()
        before = sum(p.double().sum().item() for p in model.parameters())
        if again:
            enable_gradient_checkpointing(model)
        made = ZeroConfig.from_dict(config)
        engine = make_engine(model, None, None, made, moe_layers=None, has_several=False)
        training_step(engine, torch.randn(config["train_micro_batch_size_per_gpu"], WIDTH))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            after = sum(p.double().sum().item() for p in engine.module.parameters())
        found.append((engine.zero_optimization_stage(), abs(after - before) > 1e-3))
        engine.destroy()
        del engine, model
        gc.collect()
    return found
