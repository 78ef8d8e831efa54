"""The number format that is chosen, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nbaccel import advise
from nbaccel.errors import ConfigError
from nbaccel.memory import ways
from tests.deepspeed import needs
from tests.deepspeed.advisor.models import machine

pytestmark = needs.DEEPSPEED
HOPPER, TURING, NO_GPU = machine(1), machine(1, (7, 5)), machine(0)


def chosen(asked="auto", config=(), model=None, inventory=HOPPER):
    return advise(
        model or nn.Linear(8, 8), config=dict(config), precision=asked, inventory=inventory
    )


def test_the_format_that_was_asked_for_is_taken_or_the_best_of_the_device():
    assert chosen().precision == "bf16"
    assert chosen(inventory=TURING).precision == "fp16"
    model = nn.Linear(8, 8)
    model.config = SimpleNamespace(dtype=torch.bfloat16)
    assert "65504" in str(chosen(model=model, inventory=TURING))
    assert "65504" not in str(chosen(model=model))
    assert chosen("float32").precision == "fp32"
    assert chosen(config={"fp16": {"enabled": True}}).precision == "fp16"
    assert chosen(config={"bf16": {"enabled": False}}, inventory=TURING).precision == "fp16"
    with pytest.raises(ConfigError, match=r"mixed_precision='no' contradicts .*'fp16'"):
        chosen("fp32", config={"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"precision='int8' is no precision.*bf16"):
        chosen("int8")


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_trains_in_bf16_where_it_has_instructions(monkeypatch, has_bf16, name):
    monkeypatch.setattr(ways, "computes_in_bf16", lambda: has_bf16)
    assert chosen(inventory=NO_GPU).precision == name
    assert chosen(model=nn.Linear(8, 8).half(), inventory=NO_GPU).precision == "bf16"
