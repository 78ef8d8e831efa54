from __future__ import annotations

from typing import Any

import pytest

from nbaccel import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    RunConfig,
)
from nbaccel.errors import ConfigError, PlatformUnsupported


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "fp12"}, "mixed_precision='fp12' is unknown"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
            },
            "contradicts gradient_accumulation_plugin.num_steps=3",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "got two AutocastKwargs"),
        ({"kwargs_handlers": ["text"]}, "kwargs_handlers got a str"),
        ({"log_with": "nonsense"}, "nonsense"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_given(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    "name",
    [
        "torch_tp_plugin",
        "megatron_lm_plugin",
        "parallelism_config",
    ],
)
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


def test_a_plugin_without_a_number_takes_that_of_the_argument() -> None:
    plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin
    )
    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.gradient_state.sync_with_dataloader
    assert plugin.num_steps is None  # the user's own stays


def test_a_configuration_gives_way_to_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    config = RunConfig(mixed_precision="bf16", device="cpu")
    assert Accelerator(config=config).mixed_precision == "bf16"
    assert Accelerator(config=config, mixed_precision="no").mixed_precision == "no"
    assert Accelerator(cpu=True).mixed_precision == "fp16"


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


def test_the_projects_folder_may_come_from_either_argument(tmp_path: Any) -> None:
    project = ProjectConfiguration(total_limit=2)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=project)
    assert accelerator.project_dir == tmp_path
    assert accelerator.project_configuration.total_limit == 2
    logs = ProjectConfiguration(project_dir=tmp_path, logging_dir=tmp_path / "logs")
    assert Accelerator(cpu=True, project_config=logs).logging_dir == tmp_path / "logs"


def test_the_plan_says_what_was_decided_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    text = accelerator.plan.explain()
    assert "one process, on CPU, bf16, 2 batches per step" in text
    assert "the CPU was asked for" in text
    assert str(accelerator.plan) == text
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert "the CPU was asked for" in Accelerator().plan.explain()


def test_the_state_prints_as_users_know_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    text = str(accelerator.state)
    assert text.startswith("Distributed environment: NO\nNum processes: 1\nProcess index: 0\n")
    assert text.endswith("Device: cpu\n\nMixed precision type: bf16\n")
    assert accelerator.state.distributed_type == accelerator.distributed_type == "NO"
