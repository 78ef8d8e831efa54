"""A notebook that nobody launched: cells that train with DeepSpeed, one after another."""

from __future__ import annotations

import gc
import itertools
import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, notebook_launcher
from nbaccel.deepspeed.engines import PATIENCE
from nbaccel.errors import NbaccelError
from tests.deepspeed import needs
from tests.deepspeed.engines import changes, world
from tests.deepspeed.programs import told_by
from tests.deepspeed.strategy.test_stories import some_steps, zero
from tests.deepspeed.strategy.test_training import Row, loader, net, train

pytestmark = [pytest.mark.slow, *needs.ENGINE]

ORDER = (3, 2, 3, 1, 0, 3)
"""DeepSpeed alone fails on a model that goes from stage 3 to 2."""


def cell(model: nn.Module, stage: int, ending: str) -> dict[str, Any]:
    """One cell: train, and leave in one of three ways."""
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero(stage)), mixed_precision="bf16", cpu=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = some_steps(accelerator, prepared, optimizer)
    inside = list(next(model.parameters()).shape)
    if ending == "end_training":
        accelerator.end_training()
    elif ending == "free_memory":
        accelerator.free_memory()
    del accelerator, prepared, optimizer
    gc.collect()
    values, labels = next(iter(loader()))
    return {
        "losses": losses,
        "inside": inside,
        "outside": list(next(model.parameters()).shape),
        "after": float(F.cross_entropy(model(values), labels)),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "tied": model[2].weight is model[3].weight,
        "left on it": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attributes": sorted({name for p in model.parameters() for name in vars(p)}),
    }


def cells() -> list[dict[str, Any]]:
    model = net()
    endings = ("end_training", "free_memory", "forgotten")
    return [cell(model, stage, endings[i % 3]) for i, stage in enumerate(ORDER)]


def at_once() -> list[float]:
    """Two Accelerators share the environment, and the second goes on when the first has ended."""
    pair = [Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), cpu=True) for _ in "ab"]
    models = [net(0), net(1)]
    ready = [
        accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for accelerator, model in zip(pair, models, strict=True)
    ]
    some_steps(pair[0], *ready[0])
    pair[0].free_memory()
    found = some_steps(pair[1], *ready[1])
    pair[1].free_memory()
    return found


def inline() -> dict[str, Any]:
    """A launch of one process runs here, and leaves the module whole."""
    models = {stage: net() for stage in (2, 3)}
    results = {
        stage: notebook_launcher(train, (model, Row(stage=stage, precision="bf16")))[0]
        for stage, model in models.items()
    }
    return {
        str(stage): {
            "weights": float(sum(p.double().sum() for p in model.parameters())),
            "rounded": float(sum(p.bfloat16().double().sum() for p in model.parameters())),
            "trained": float(
                sum(v.double().sum() for n, v in results[stage]["state"].items() if n != "scale")
            )
            - float(results[stage]["state"]["2.weight"].double().sum()),
        }
        for stage, model in models.items()
    }


def built_in_shards() -> list[Any]:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    plugin = DeepSpeedPlugin(hf_ds_config=zero(3))
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    shards = AutoModelForCausalLM.from_config(config)
    with plugin.zero3_init_context_manager(enable=False):
        whole = AutoModelForCausalLM.from_config(config)
    words = torch.arange(8).view(1, 8)
    expected = whole(words).logits
    prepared, optimizer = accelerator.prepare(
        shards, torch.optim.AdamW(shards.parameters(), lr=1e-2)
    )
    losses = []
    for _ in range(3):
        loss = prepared(words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss))
    found = [list(m.transformer.wte.weight.shape) for m in (shards, whole)]
    accelerator.free_memory()
    return [*found, list(shards.transformer.wte.weight.shape), list(expected.shape), losses]


class Endless(nn.Module):
    """A model whose loss is what it is told to be, made in bfloat16 as it says."""

    def __init__(self, made_in: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.config = type("Config", (), {"dtype": made_in, "to_dict": dict})()

    def forward(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        return (self.layer(values) * scale).sum()


def troubled(scale: float, made_in: str, fp16: dict[str, Any] | None, steps: int = 40) -> Any:
    """What a run that gets nowhere says, and after how many steps."""
    config = zero(2)
    if fp16 is not None:
        config["fp16"] = {"enabled": True, **fp16}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True)
    model = Endless(made_in)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    said: list[str] = []
    skipped = made = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                accelerator.backward(prepared(torch.ones(2, 8), scale))
                optimizer.step()
                made += 1
                skipped += accelerator.optimizer_step_was_skipped
        except NbaccelError as error:
            said.append(f"{type(error).__name__}: {error}")
    said += [str(w.message) for w in caught if "loss is NaN or infinite" in str(w.message)]
    accelerator.free_memory()
    return {"steps": made, "skipped": int(skipped), "said": said}


def troubles() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    found = {"nan in fp32": troubled(float("nan"), "float32", None, steps=3)}
    # DeepSpeed refuses float16 on this device by this answer alone; its loss scaling runs anywhere.
    type(get_accelerator()).is_fp16_supported = lambda self: True  # also where this CPU has none
    scaling = {"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}
    found["nan in fp16"] = troubled(float("nan"), "bfloat16", {"initial_scale_power": 16})
    found["nan, not of bf16"] = troubled(float("nan"), "float32", {"initial_scale_power": 16})
    found["overflow"] = troubled(6e4, "float32", scaling)
    found["fixed scale"] = troubled(6e4, "bfloat16", {"loss_scale": 1})
    found["recovers"] = troubled(1.0, "float32", {"initial_scale_power": 24, "hysteresis": 1})
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a process of its own tells: DeepSpeed is imported for good."""
    return told_by("tests.deepspeed.strategy.test_bare", timeout_s=800)


def test_each_cell_leaves_a_whole_module_to_the_next_and_nothing_else(told):
    for stage, cell in zip(ORDER, told["cells"], strict=True):
        assert cell["inside"] == ([0] if stage == 3 else [33, 64])
        assert cell["outside"] == [33, 64]
        assert cell["dtypes"] == ["torch.float32"]
        assert cell["tied"]
        assert set(cell["left on it"]) == {0}
        assert cell["attributes"] == []
    for before, after in itertools.pairwise(told["cells"]):
        # The same first batch, in bfloat16 by the engine and in float32 by the module.
        assert after["losses"][0] == pytest.approx(before["after"], abs=2e-3)
        assert after["after"] < before["after"]
    assert told["at_once"][-1] < told["at_once"][0]
    shards, whole, given_back, _, losses = told["built"]
    assert (shards, whole, given_back) == ([0], [32, 16], [32, 16])
    assert losses[-1] < losses[0]
    assert told["left"] == {}


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_launch_of_one_process_leaves_float32_weights(told, stage):
    found = told["inline"][stage]
    assert found["rounded"] == pytest.approx(found["trained"], abs=1e-9)
    assert found["weights"] != pytest.approx(found["trained"], abs=1e-5)
    assert found["weights"] == pytest.approx(told["inline"]["2"]["weights"], abs=1e-6)


# ------------------------------------------------------------------------------- troubles
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nan in fp16", ["made in bfloat16", '"bf16": {"enabled": true} in place of "fp16"']),
        ("nan, not of bf16", ["65504", '"bf16": {"enabled": true}', "optimizer.params.lr"]),
        ("overflow", ["fp16.min_loss_scale", "nothing is trained", '"bf16": {"enabled": true}']),
        ("fixed scale", [f"stayed there for {PATIENCE} steps", "made in bfloat16"]),
    ],
)
def test_a_run_that_gets_nowhere_ends_and_names_the_key(told, case, words):
    found = told["troubles"][case]
    assert found["steps"] < PATIENCE
    assert found["said"][0].startswith("TrainingDiverged: ")
    for word in words:
        assert word in found["said"][0]


def test_a_loss_is_told_once_and_a_scale_that_finds_its_place_is_no_trouble(told):
    (said,) = told["troubles"]["nan in fp32"]["said"]
    assert "optimizer.params.lr" in said
    assert "gradient_clipping" in said
    found = told["troubles"]["recovers"]
    assert found["said"] == []
    assert 0 < found["skipped"] < found["steps"] == 40


if __name__ == "__main__":
    before = world()
    stories = {
        "cells": cells(),
        "at_once": at_once(),
        "inline": inline(),
        "built": built_in_shards(),
    }
    gc.collect()
    left = changes(before, world())
    print(json.dumps({**stories, "left": left, "troubles": troubles()}))
