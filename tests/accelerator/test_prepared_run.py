"""What an `Accelerator` is asked: arguments, the environment, a configuration or a picker."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from nbaccel import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    RunConfig,
    notebook_launcher,
)
from nbaccel.errors import ConfigError, PlatformUnsupported
from tests.strategies.needs import SHARDING

THREE = GradientAccumulationPlugin(num_steps=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "fp12"}, "mixed_precision='fp12' is unknown"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": THREE},
            "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3",
        ),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            "kwargs_handlers with AutocastKwargs",
        ),
        ({"kwargs_handlers": ["text"]}, "kwargs_handlers got a str"),
        ({"log_with": "nonsense"}, "nonsense"),
        ({"config": "bf16"}, "config must be a RunConfig, or a picker: got 'bf16'"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_given(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize("name", ["torch_tp_plugin", "megatron_lm_plugin", "parallelism_config"])
def test_what_cannot_be_served_is_refused_not_ignored(name: str) -> None:
    arguments: dict[str, Any] = {name: "something"}
    with pytest.raises(PlatformUnsupported, match=name):
        Accelerator(cpu=True, **arguments)
    arguments[name] = None
    assert Accelerator(cpu=True, **arguments).num_processes == 1


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5"])
def test_nonsense_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", text)
    with pytest.raises(ConfigError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='" + text):
        Accelerator(cpu=True)


def test_the_environment_gives_way_to_a_configuration_and_both_to_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    plugin = GradientAccumulationPlugin(num_steps=5)
    for arguments, precision, steps in (
        ({"config": Picker(), "mixed_precision": "no", "gradient_accumulation_steps": 2}, "no", 2),
        ({"config": Picker()}, "bf16", 3),
        ({"gradient_accumulation_steps": 1}, "fp16", 1),  # also what would be the default
        ({"gradient_accumulation_plugin": plugin}, "fp16", 5),
        ({}, "fp16", 7),
    ):
        accelerator = Accelerator(**{"cpu": True, **arguments})
        found = (accelerator.mixed_precision, accelerator.gradient_accumulation_steps)
        assert found == (precision, steps)
    choices = {choice.name: choice.reason for choice in Accelerator(config=Picker()).plan.choices}
    assert "config" in choices["gradient_accumulation_steps"]


def test_settings_can_be_read_from_the_accelerator(tmp_path: Any) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=config,
        project_dir=tmp_path,
        kwargs_handlers=[GradScalerKwargs(init_scale=4.0)],
        mixed_precision="fp16",
        step_scheduler_with_optimizer=False,
        rng_types=["torch", "generator"],
    )
    assert accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    assert accelerator.even_batches
    assert accelerator.dispatch_batches is None
    assert not accelerator.split_batches
    assert not accelerator.use_stateful_dataloader
    assert accelerator.project_dir == accelerator.logging_dir == tmp_path
    assert accelerator.save_iteration == 0
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 4.0
    assert not accelerator.step_scheduler_with_optimizer
    assert accelerator.rng_types == ["torch", "generator"]
    assert not accelerator.is_fsdp2
    assert not accelerator.multi_device
    assert accelerator.deepspeed_plugin is None
    accelerator.even_batches = False
    assert config.even_batches  # the user's own stays


class Switched(nn.Linear):
    """A module with the switch that models of transformers have."""

    recomputes = False

    def gradient_checkpointing_enable(self) -> None:
        self.recomputes = True


class Picker:
    """Has a configuration."""

    config = RunConfig(device="cpu", mixed_precision="bf16", gradient_accumulation_steps=3)


def test_activations_are_recomputed_where_that_is_asked_for():
    model = Switched(2, 2)
    Accelerator(config=RunConfig(device="cpu", activation_checkpointing=True)).prepare(model)
    assert model.recomputes

    with pytest.raises(ConfigError, match=r"Linear has no gradient_checkpointing_enable\(\)"):
        Accelerator(config=RunConfig(device="cpu", activation_checkpointing=True)).prepare(
            nn.Linear(2, 2)
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
    config = RunConfig(num_processes=1, device="cpu", gradient_accumulation_steps=4)
    assert notebook_launcher(asked, (Switched(2, 2),), config=config) == [(False, 4, "no")]
    assert Accelerator(cpu=True).gradient_accumulation_steps == 1, "inline forgets it"
    more = {"mixed_precision": "bf16", "activation_checkpointing": True}
    config = config.changed(num_processes=2, **more)
    assert notebook_launcher(asked, (Switched(2, 2),), config=config) == [(True, 4, "bf16")] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


@SHARDING
def test_fsdp_is_set_up_as_the_configuration_says():
    config = RunConfig(
        num_processes=2,
        device="cpu",
        strategy="fsdp",
        fsdp={
            "transformer_cls_names_to_wrap": ["Block"],
            "reshard_after_forward": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
    )

    def body():
        from torch.distributed.fsdp import FSDPModule

        accelerator = Accelerator()
        model = nn.Sequential(Block(), nn.Linear(4, 4), Block())
        model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        plugin = accelerator.state.fsdp_plugin
        return (
            [isinstance(part, FSDPModule) for part in accelerator.unwrap_model(model)],
            plugin.reshard_after_forward,
            plugin.writes_shards,
        )

    assert notebook_launcher(body, config=config) == [([True, False, True], False, False)] * 2


def test_models_are_compiled_as_the_configuration_says():
    config = RunConfig(num_processes=1, device="cpu", start_method="template", dynamo="eager")

    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(2, 2))
        # Where a model keeps its compiled call.
        return model._compiled_call_impl is not None, str(accelerator.state.dynamo_plugin.backend)

    assert notebook_launcher(body, config=config) == [(True, "EAGER")]
