"""transformers: three steps of its Trainer with a tiny GPT-2."""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def use(_rank: int) -> int:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=64)
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (32, 32))]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=samples)
    steps: int = trainer.train().global_step
    assert steps == 3
    return steps
