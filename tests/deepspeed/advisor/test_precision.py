"""The number format that is chosen, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nbaccel.deepspeed.advisor import ladder
from nbaccel.deepspeed.advisor.ladder import choose_precision
from nbaccel.errors import ConfigError
from tests.deepspeed.advisor.models import machine

HOPPER, TURING = machine(1).gpus, machine(1, (7, 5)).gpus


def chosen(asked="auto", config=(), model=None, gpus=()):
    return choose_precision(
        asked, base_config=dict(config), model=model or nn.Linear(1, 1), device_units=gpus
    )


def test_a_gpu_that_has_bf16_trains_in_it_and_an_older_one_in_fp16():
    assert chosen(gpus=HOPPER).name == "bf16"
    found = chosen(gpus=TURING)
    assert (found.name, found.warning) == ("fp16", "")
    assert "only imitates bf16" in found.reason


def test_a_model_pretrained_in_bf16_is_warned_of_fp16():
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(dtype=torch.bfloat16)
    assert "65504" in chosen(model=model, gpus=TURING).warning
    assert not chosen(model=model, gpus=HOPPER).warning


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_trains_in_bf16_where_it_has_instructions(monkeypatch, has_bf16, name):
    monkeypatch.setattr(ladder, "_cpu_has_bf16", lambda: has_bf16)
    assert chosen().name == name


def test_a_model_in_16_bit_stays_so_on_a_cpu(monkeypatch):
    monkeypatch.setattr(ladder, "_cpu_has_bf16", lambda: False)
    assert chosen(model=nn.Linear(1, 1).half()).name == "bf16"


def test_what_was_asked_for_or_written_is_taken():
    assert chosen("float32", gpus=HOPPER).name == "fp32"
    assert chosen(config={"fp16": {"enabled": True}}, gpus=HOPPER).name == "fp16"
    assert chosen(config={"bf16": {"enabled": False}}, gpus=TURING).name == "fp16"


def test_two_formats_are_refused_and_so_is_none():
    with pytest.raises(ConfigError, match=r"precision='fp32' and fp16\.enabled=true.*two formats"):
        chosen("fp32", config={"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"precision='int8' is no precision.*bf16"):
        chosen("int8")
