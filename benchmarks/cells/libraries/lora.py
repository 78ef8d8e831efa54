"""peft: three steps of the LoRA weights of a tiny GPT-2."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel


def use(_rank: int) -> float:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=64)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = torch.nn.parallel.DistributedDataParallel(get_peft_model(GPT2LMHeadModel(config), lora))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    loss = torch.zeros(())
    for _ in range(3):
        tokens = torch.randint(0, 128, (4, 32))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
