from __future__ import annotations

import base64
import json

import pytest

from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.text_forms import read_yaml
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.errors import ConfigError
from nbaccel.plan.topology import run_variables

FILE = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
}


def test_each_fact_stands_in_one_place_and_the_whole_is_put_together_again():
    config = RunConfig(deepspeed=FILE)

    assert (config.zero_stage, config.mixed_precision) == (3, "bf16")
    assert config.gradient_accumulation_steps == 2
    assert config.deepspeed == {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 0.5,
    }
    assert FILE["zero_optimization"]["stage"] == 3, "what was given is left alone"
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    assert engine_config(RunConfig(deepspeed=FILE)) == FILE | sizes
    assert engine_config(RunConfig()) is None
    assert engine_config(RunConfig(zero_stage=0)) is None, "no engine for nothing"
    assert engine_config(RunConfig(deepspeed={}))["zero_optimization"] == {"stage": 0}
    assert engine_config(RunConfig(zero_stage=2))["zero_optimization"] == {"stage": 2}
    auto = {"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}}
    config = RunConfig(deepspeed=auto, mixed_precision="fp16", zero_stage=3)

    assert engine_config(config)["fp16"] == {"enabled": True, "loss_scale": 0}
    assert RunConfig(deepspeed=auto).zero_stage == 2, "as Accelerate does"
    assert engine_config(RunConfig(deepspeed=auto))["fp16"] == {"enabled": False, "loss_scale": 0}


@pytest.mark.parametrize("form", ["text", "path", "object", "mapping"])
def test_a_file_may_come_in_any_form(form, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    given = {
        "text": json.dumps(FILE),
        "path": path,
        "object": ZeroConfig.from_dict(FILE),
        "mapping": FILE,
    }
    assert RunConfig(deepspeed=given[form]) == RunConfig(deepspeed=FILE)


def test_contradictions_are_told_before_anything_starts():
    with pytest.raises(ConfigError) as caught:
        RunConfig(
            deepspeed=FILE, zero_stage=2, mixed_precision="fp16", gradient_accumulation_steps=1
        )
    assert len(caught.value.mistakes) == 3
    assert "zero_stage=2 contradicts the DeepSpeed configuration, which says 3" in str(caught.value)
    with pytest.raises(ConfigError, match="zero_stage must be one of 0, 1, 2, 3"):
        RunConfig(deepspeed={"zero_optimization": {"stage": 7}})
    with pytest.raises(ConfigError, match="names train_batch_size more than once"):
        RunConfig(deepspeed='{"train_batch_size": 8, "train_batch_size": 16}')
    with pytest.raises(ConfigError, match=r"deepspeed must be a .*got 3"):
        RunConfig(deepspeed=3)


@pytest.mark.parametrize("on", [True, "true", " TRUE "])
def test_a_precision_is_taken_however_deepspeed_lets_it_be_written(on):
    for name in ("bf16", "bfloat16"):
        config = engine_config(RunConfig(deepspeed={name: {"enabled": on}}))
        assert (config["bf16"], "bfloat16" in config) == ({"enabled": True}, False)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bf16": {"enabled": 1}}, "bf16.enabled must be true or false: got 1"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled must be true or false: got 'yes'"),
        ({"bf16": True}, "bf16 must be a section: got True"),
        ({"zero_optimization": 3}, "zero_optimization must be a section: got 3"),
        ({"steps_per_print": float("inf")}, "steps_per_print is infinite"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "true"}}, "16.enabled are both true"),
    ],
)
def test_what_would_train_something_else_is_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        RunConfig(deepspeed=settings)


def test_a_precision_that_the_file_turns_off_contradicts_the_run():
    off = {"bf16": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"mixed_precision='bf16' contradicts.*bf16.enabled"):
        RunConfig(mixed_precision="bf16", deepspeed=off)
    assert RunConfig(mixed_precision="fp16", deepspeed=off).mixed_precision == "fp16"
    assert RunConfig(deepspeed=off).changed(mixed_precision="bf16").mixed_precision == "bf16"


def test_a_copy_can_change_what_the_file_said():
    config = RunConfig(deepspeed=FILE)

    assert config.changed(zero_stage=2).zero_stage == 2
    assert config.changed(mixed_precision="fp16").deepspeed == config.deepspeed
    other = config.changed(deepspeed={"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}})
    assert (other.zero_stage, other.mixed_precision) == (1, "fp16")
    assert other.gradient_accumulation_steps == 2, "the new file says nothing of it"


def test_workers_are_told_by_accelerates_variables():
    config = RunConfig(deepspeed=FILE, activation_checkpointing=True)
    variables = run_variables(config)

    sent = variables.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    assert json.loads(base64.urlsafe_b64decode(sent)) == engine_config(config)
    assert variables == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "NBACCEL_ACTIVATION_CHECKPOINTING": "1",
    }
    assert run_variables(RunConfig(mixed_precision="bf16")) == {}
    at_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert run_variables(RunConfig(zero_stage=2)) == at_2
    fsdp = {"NBACCEL_STRATEGY": "fsdp", "ACCELERATE_USE_FSDP": "true"}
    assert run_variables(RunConfig(strategy="fsdp")) == fsdp
    fp8 = run_variables(RunConfig(mixed_precision="fp8", fp8="ao"))
    assert fp8["ACCELERATE_FP8_BACKEND"] == "AO"


def test_yaml_has_the_numbers_of_json():
    text = "num_processes: 2\ndeepspeed:\n  optimizer:\n    params: {lr: 3e-5, eps: 1.0e-8}\n"
    run = RunConfig.from_yaml(text + "  zero_optimization: {reduce_bucket_size: 5e8}\n")
    assert run.deepspeed is not None
    assert run.deepspeed["optimizer"]["params"] == {"lr": 3e-5, "eps": 1e-8}
    assert run.deepspeed["zero_optimization"]["reduce_bucket_size"] == 5e8
    assert RunConfig.from_yaml(run.to_yaml()) == run
    assert read_yaml("[3e-5, 1E6, -.5e-3, 1.5e3, '3e-5', e5, 1e, 2026-11-22x]") == [
        *(3e-5, 1e6, -0.5e-3, 1.5e3, "3e-5", "e5", "1e", "2026-11-22x")
    ]
