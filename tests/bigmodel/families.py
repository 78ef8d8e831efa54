"""Small models of transformers: decoders, an encoder, and both in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

FAMILIES = ("gpt2", "llama", "t5", "bert")
_LAYERS = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 32},
    "llama": {**_LAYERS, "num_attention_heads": 2},
    "t5": {"num_layers": 3, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2},
    "bert": {**_LAYERS, "num_attention_heads": 2, "max_position_embeddings": 32},
}
_CLASSES = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}


def build(family: str, **settings: Any) -> Any:
    """A new model; where it lies is for the caller to say."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family, vocab_size=200, **_TOKENS, **_SIZES[family], **settings
    )
    auto_class = getattr(transformers, _CLASSES.get(family, "AutoModelForCausalLM"))
    return auto_class.from_config(config)


def inputs(family: str) -> dict[str, torch.Tensor]:
    """What it is called with."""
    tokens = torch.arange(3, 11).unsqueeze(0)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if family == "t5" else {})
