"""`Accelerator(config=...)`: what a configuration, or a picker that has one, decides."""

from __future__ import annotations

import pytest
import torch

from nbaccel import Accelerator, RunConfig, notebook_launcher
from nbaccel.errors import ConfigError


class Switched(torch.nn.Linear):
    """A module with the switch that models of transformers have."""

    recomputes = False

    def gradient_checkpointing_enable(self) -> None:
        self.recomputes = True


class Holder:
    """Has a configuration, as a picker has."""

    config = RunConfig(device="cpu", mixed_precision="bf16", gradient_accumulation_steps=3)


def test_a_picker_is_taken_as_its_configuration():
    accelerator = Accelerator(config=Holder())

    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    choices = {choice.name: choice.reason for choice in accelerator.plan.choices}
    assert "config" in choices["gradient_accumulation_steps"]


def test_arguments_win_over_it():
    accelerator = Accelerator(
        mixed_precision="no", gradient_accumulation_steps=2, config=Holder.config
    )
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 2


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="config must be a RunConfig, or a picker: got 'bf16'"):
        Accelerator(config="bf16")


def test_activations_are_recomputed_where_that_is_asked_for():
    model = Switched(2, 2)
    Accelerator(config=RunConfig(device="cpu", activation_checkpointing=True)).prepare(model)
    assert model.recomputes

    left_alone = Switched(2, 2)
    Accelerator(config=RunConfig(device="cpu")).prepare(left_alone)
    assert not left_alone.recomputes
    with pytest.raises(ConfigError, match=r"Linear has no gradient_checkpointing_enable\(\)"):
        Accelerator(config=RunConfig(device="cpu", activation_checkpointing=True)).prepare(
            torch.nn.Linear(2, 2)
        )


def asked(model):
    accelerator = Accelerator()
    prepared = accelerator.prepare(model)
    return (
        accelerator.unwrap_model(prepared).recomputes,
        accelerator.gradient_accumulation_steps,
        accelerator.mixed_precision,
    )


def test_workers_are_told_what_was_picked():
    config = RunConfig(
        num_processes=2,
        device="cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        activation_checkpointing=True,
    )
    assert notebook_launcher(asked, (Switched(2, 2),), config=config) == [(True, 4, "bf16")] * 2


def test_inline_is_told_the_same_and_forgets_it():
    config = RunConfig(num_processes=1, device="cpu", gradient_accumulation_steps=4)
    assert notebook_launcher(asked, (Switched(2, 2),), config=config) == [(False, 4, "no")]
    assert Accelerator(cpu=True).gradient_accumulation_steps == 1
