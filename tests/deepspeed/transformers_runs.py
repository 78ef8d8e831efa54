"""transformers' ways to use DeepSpeed, in one process; tells what became of them, as JSON."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from nbaccel.deepspeed.environment import deepspeed_environment
from tests.deepspeed.engines import changes, config, world


def tiny_model() -> Any:
    shape = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    return AutoModelForCausalLM.from_config(shape)


def shapes(model: Any) -> list[tuple[int, ...]]:
    return sorted({tuple(p.shape) for p in model.parameters()})


def fit(deepspeed: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=deepspeed,
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=rows)
    trainer.train()
    return {
        "deepspeed": trainer.is_deepspeed_enabled,
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def main() -> dict[str, Any]:
    before = world()
    with deepspeed_environment():
        kept = HfDeepSpeedConfig(config(3))
        inside = shapes(tiny_model())
    told: dict[str, Any] = {"inside": inside, "zero_3_afterwards": is_deepspeed_zero3_enabled()}
    told["afterwards"] = shapes(tiny_model())
    del kept
    settings = config(2) | {"train_micro_batch_size_per_gpu": "auto"}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with tempfile.TemporaryDirectory() as folder:
        with deepspeed_environment():
            told["trainer"] = fit(settings, folder)
        after = world()
        told["left"] = changes(before, after)
        told["plain_trainer"] = fit(None, folder)
    return told


if __name__ == "__main__":
    print(json.dumps(main()))
