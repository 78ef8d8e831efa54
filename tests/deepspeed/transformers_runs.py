"""transformers' ways to use DeepSpeed, in one process; tells what became of them, as JSON."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    T5Config,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from nbaccel.deepspeed.environment import deepspeed_environment
from tests.deepspeed.engines import changes, config, world

GPT2 = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
T5 = T5Config(
    vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
)
KINDS = {"gpt2": (AutoModelForCausalLM, GPT2), "t5": (AutoModelForSeq2SeqLM, T5)}
TRAP = "ACCELERATE_USE_DEEPSPEED"


def tiny_model(name: str) -> Any:
    kind, shape = KINDS[name]
    torch.manual_seed(0)
    return kind.from_config(shape)


def shapes(model: Any) -> list[tuple[int, ...]]:
    return sorted({tuple(p.shape) for p in model.parameters()})


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Parameters with what ZeRO-3 has taken away from this process brought back."""
    import deepspeed

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: value.detach().clone() for name, value in parameters.items()}


def in_pieces(name: str, saved: Path) -> dict[str, Any]:
    """A model made, and one read from a folder, while a ZeRO-3 configuration is alive."""
    kind, shape = KINDS[name]
    before = tiny_model(name)
    before.save_pretrained(saved)
    with deepspeed_environment():
        kept = HfDeepSpeedConfig(config(3))
        made, read = kind.from_config(shape), kind.from_pretrained(saved)
        found = {"made": shapes(made), "read": shapes(read)}
        values, originals = whole(read), dict(before.named_parameters())
        found["same"] = values.keys() == originals.keys() and all(
            torch.equal(values[key], originals[key]) for key in values
        )
    found["zero_3_afterwards"] = is_deepspeed_zero3_enabled()
    found["afterwards"] = shapes(kind.from_pretrained(saved))
    del kept
    return found


def fit(make: Any, deepspeed: Any, folder: Path, **more: Any) -> dict[str, Any]:
    """Train a model, which is made once it is known whether it is made in pieces."""
    options = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=deepspeed,
        max_steps=4,
        learning_rate=0.01,
        per_device_train_batch_size=4,
        **options,
        **more,
    )
    model = make()
    made = shapes(model)
    rows = [{"input_ids": [1, 2, number % 5], "labels": [1, 2, 3]} for number in range(32)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    engine, enabled = trainer.model_wrapped, trainer.is_deepspeed_enabled
    return {
        "wrapped": type(engine).__name__,
        "stage": engine.zero_optimization_stage() if enabled else None,
        "world_size": arguments.world_size,
        "shapes": made,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "trap": TRAP in os.environ,
    }


def settings(stage: int) -> dict[str, Any]:
    return config(stage) | {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }


def trained(folder: Path) -> dict[str, Any]:
    """Trainers with a dictionary, with a file's path, and without DeepSpeed, in this order."""
    told: dict[str, Any] = {}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(settings(3)))
    gc.collect()  # models that were in pieces hold their process group, with its port
    for name, how, given in (("gpt2", "dictionary", settings(2)), ("t5", "path", str(path))):
        before = world()
        with deepspeed_environment():
            told[how] = fit(partial(tiny_model, name), given, folder, use_cpu=True)
        told[how]["left"] = changes(before, world())
    told["none"] = fit(partial(tiny_model, "t5"), None, folder, use_cpu=True)
    return told


def main() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pieces = {kind: in_pieces(kind, folder / kind) for kind in KINDS}
        return {"pieces": pieces, "trained": trained(folder)}


if __name__ == "__main__":
    print(json.dumps(main()))
