"""The cells of the quick tour on big models, as they stand there but for the import.

Their model is a tiny one of random weights, in a folder of the name that the guide downloads.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

NAME = "mistralai/Mixtral-8x7B-Instruct-v0.1"

EMPTY = """
from nbaccel import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("mistralai/Mixtral-8x7B-Instruct-v0.1")
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(config)
"""
LOAD = """
from nbaccel import load_checkpoint_and_dispatch

model = load_checkpoint_and_dispatch(
    model, checkpoint="mistralai/Mixtral-8x7B-Instruct-v0.1", device_map="auto", no_split_module_classes=['Block']
)
"""  # noqa: E501 - as it stands in the guide


@pytest.fixture
def saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # In the names of today's modules: those of the published files are of an older version, which
    # from_pretrained of transformers alone converts.
    model.save_pretrained(tmp_path / NAME, max_shard_size="20KB", save_original_format=False)
    monkeypatch.chdir(tmp_path)
    return model


def run_cells(*cells: str) -> torch.nn.Module:
    namespace: dict[str, object] = {}
    for cell in cells:
        exec(textwrap.dedent(cell), namespace)
    model = namespace["model"]
    assert isinstance(model, torch.nn.Module)
    return model


def test_the_model_is_built_without_memory(saved_model: torch.nn.Module) -> None:
    model = run_cells(EMPTY)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    shapes = {name: tensor.shape for name, tensor in saved_model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes


def test_the_loaded_model_gives_the_same_numbers(saved_model: torch.nn.Module) -> None:
    model = run_cells(EMPTY, LOAD).eval()
    tokens = torch.arange(3, 13).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, saved_model(tokens).logits)
    assert set(model.hf_device_map.values()) <= {0, "cpu"}
    written = model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None)
    expected = saved_model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(written, expected)
