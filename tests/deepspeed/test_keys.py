"""Keys that DeepSpeed does not read: comments, what is ignored, and what is a mistake."""

from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.deepspeed.auto_values import resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.schema import deepspeed_schema, misspelt_keys
from nbaccel.deepspeed.zero_config import old_forms
from nbaccel.errors import ConfigError
from tests.deepspeed import needs

pytestmark = needs.DEEPSPEED

BATCH = {"train_micro_batch_size_per_gpu": 4}
ZERO = "zero_optimization"


def checked(**settings):
    return check_config({**BATCH, **settings}, check_tools=False)


def refused(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config({**BATCH, **settings}, check_tools=False)
    return str(caught.value)


@pytest.mark.parametrize("key", ["_comment", "//", "// why", "#", "$schema", "comment"])
def test_a_comment_is_left_alone(key):
    assert checked(**{key: "for the small model"}).warnings == ()
    assert checked(optimizer={"type": "AdamW", key: "as in the paper"}).warnings == ()


def test_a_comment_where_deepspeed_refuses_it_is_told_with_a_place_for_it():
    told = refused(**{ZERO: {"stage": 2, "_comment": "fast"}})
    assert "zero_optimization._comment is a comment, and DeepSpeed " in told
    assert "Move it to the top level." in told


@pytest.mark.parametrize("key", ["comms_config", "monitor_config", "cuda_visible_devices"])
def test_what_resembles_no_key_is_ignored_with_a_warning(key):
    (warning,) = checked(**{key: {"enabled": True}}).warnings
    assert warning.startswith(f"{key} is no key of DeepSpeed ")
    assert "which ignores it" in warning


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("batch_size", "train_batch_size"),
        ("micro_batch_size", "train_batch_size"),
        ("accumulation_steps", "gradient_accumulation_steps"),
        ("max_grad_norm", "gradient_clipping"),
        ("clip_grad_norm", "gradient_clipping"),
        ("mixed_precision", "bf16"),
        ("BF16", "bf16"),
        ("lr_scheduler", "scheduler"),
        ("optim", "optimizer"),
        ("zero_opt", "zero_optimization"),
        ("zero_stage", "zero_optimization"),
        ("offload_optimizer_device", "zero_optimization"),
        ("learning_rate", "optimizer.params"),
        ("monitor_csv", "csv_monitor"),
    ],
)
def test_what_resembles_a_key_is_refused(key, meant):
    told = refused(**{key: 1})
    assert f"{key} is no key of DeepSpeed" in told
    assert meant in told.partition("silently ignore it.")[2]


def test_keys_without_a_field_and_old_names_are_read_as_deepspeed_does():
    made = checked(aio={"thread_count": 3, "block_size": 1 << 20})
    assert made.config.to_dict()["aio"] == {"intra_op_parallelism": 3, "block_size": 1 << 20}
    assert made.warnings == ("thread_count is an old form: write intra_op_parallelism=3.",)
    settings = {"stage": 1, "legacy_stage1": True, "elastic_checkpoint": "auto"}
    (warning,) = checked(**{ZERO: settings}).warnings
    key = "zero_optimization.elastic_checkpoint"
    assert warning == f'{key}="auto" leaves it to DeepSpeed, whose default is False.'
    told = refused(**{ZERO: {"stage": 1, "legacy_stage1": "old"}})
    assert "zero_optimization.legacy_stage1 is refused by DeepSpeed: got 'old'. It says: " in told
    assert "'legacy_stage1'" in refused(**{ZERO: {"stage": 1, "legacy_stage": True}})


def test_auto_where_deepspeed_takes_its_default():
    zero = {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_max_live_parameters": "auto",
        "offload_param": {"device": "cpu", "buffer_size": "auto"},
    }
    assert sorted(checked(**{ZERO: zero}).warnings) == [
        'zero_optimization.offload_param.buffer_size="auto" leaves it to DeepSpeed, whose default '
        "is 100000000.",
        'zero_optimization.stage3_max_live_parameters="auto" leaves it to DeepSpeed, whose default '
        "is 1000000000.",
    ]
    resolved = resolve_auto({**BATCH, ZERO: zero})
    made = resolved.config.to_dict()[ZERO]
    assert "stage3_max_live_parameters" not in made
    assert made["offload_param"] == {"device": "cpu"}
    assert {choice.name: choice.value for choice in resolved.choices} == {
        "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
        "zero_optimization.offload_param.buffer_size": 100_000_000,
    }


def test_a_removed_section_is_told_at_once_and_second_shards_must_come_out_even():
    settings = {**BATCH, "amp": {"enabled": "auto", "opt_level": "auto"}}
    with pytest.raises(ConfigError) as caught:
        resolve_auto(settings)
    assert len(set(caught.value.mistakes)) == 1
    assert "is of the past." in caught.value.mistakes[0]
    with pytest.raises(ConfigError) as caught:
        check_config(settings, check_tools=False, allow_auto=True)
    assert len(caught.value.mistakes) == 1
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    settings = {**BATCH, ZERO: zero}
    with pytest.raises(ConfigError, match=r"=4 does not divide 6 processes.*Give 2 or 3 or 6"):
        check_config(settings, world_size=6, check_tools=False)
    check_config(settings, world_size=8, check_tools=False)
    check_config(settings, check_tools=False)
    with pytest.raises(ConfigError, match="does not divide 6"):
        check_config(settings, run=RunConfig(num_processes=6), check_tools=False, allow_auto=True)


def test_no_key_of_deepspeed_is_taken_for_a_misspelt_one_where_it_is_not_installed():
    for section_path, known_keys in deepspeed_schema().sections.items():
        for key in known_keys:
            nested = {key: True}
            for step in reversed(section_path.split(".") if section_path else []):
                nested = {step: nested}
            assert list(misspelt_keys(old_forms(nested)[0])) == []
