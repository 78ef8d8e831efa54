"""Members of a plugin that code written for Accelerate calls, beside Accelerate's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nbaccel import DeepSpeedPlugin
from nbaccel.deepspeed.strategy.plugin import Plugins
from nbaccel.errors import ConfigError
from tests.deepspeed import needs

pytestmark = needs.DEEPSPEED

FILE: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": 8,
}
VALUES = {
    "optimizer.params.lr": 0.5,
    "optimizer.params.weight_decay": 0.2,
    "zero_optimization.reduce_bucket_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "nowhere.at_all": 1,
}


def plugin() -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config=copy.deepcopy(FILE))


def theirs() -> Any:
    accelerate = pytest.importorskip("accelerate.utils")
    return accelerate.DeepSpeedPlugin(hf_ds_config=copy.deepcopy(FILE))


def test_a_configuration_is_filled_in_as_accelerate_does():
    mine, peer = plugin(), theirs()
    for one in (mine, peer):
        one.deepspeed_config_process(must_match=False, **VALUES)
    assert mine.deepspeed_config["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.1}
    for key, value in mine.deepspeed_config.items():
        assert {**peer.deepspeed_config}[key] == value


@pytest.mark.parametrize("make", [plugin, theirs])
def test_what_does_not_match_is_told_and_what_is_missing_too(make):
    mismatches: list[str] = []
    one = make()
    one.fill_match("optimizer.params.weight_decay", mismatches, **VALUES)
    one.fill_match("nowhere.at_all", mismatches, **VALUES)
    assert mismatches == [
        "- ds optimizer.params.weight_decay=0.1 vs arg optimizer.params.weight_decay=0.2"
    ]
    with pytest.raises(ValueError, match="weight_decay"):
        make().deepspeed_config_process(**VALUES)
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr"):
        one.fill_match("optimizer.params.lr")


@pytest.mark.parametrize(
    ("precision", "on"), [("no", None), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "bf16")]
)
def test_a_precision_is_written_where_the_file_leaves_it_open(precision, on):
    mine, peer = plugin(), theirs()
    for one in (mine, peer):
        one.set_mixed_precision(precision)
        assert {name: one.deepspeed_config[name]["enabled"] for name in ("fp16", "bf16")} == {
            "fp16": on == "fp16",
            "bf16": on == "bf16",
        }
    assert mine.deepspeed_config["fp16"] == peer.deepspeed_config["fp16"]
    mine.deepspeed_config |= {"fp16": {"enabled": True}, "bf16": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"fp16\.enabled is true"):
        mine.set_mixed_precision("bf16")


def test_one_of_several_is_selected_by_its_name_and_none_by_itself():
    student, teacher = plugin(), plugin()
    assert not student.selected
    plugins = Plugins({"student": student, "teacher": teacher})
    assert (student.selected, teacher.selected) == (True, False)
    plugins.select("teacher")
    assert (student.selected, teacher.selected) == (False, True)
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        student.select()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        student.selected = True
    assert "_selected" not in student.to_dict()


def test_expert_layers_are_found_by_name(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Linear")
    one = DeepSpeedPlugin(zero_stage=3)
    one.set_moe_leaf_modules(model)
    assert model[0]._z3_leaf
    one.transformer_moe_cls_names = "Experts"
    with pytest.raises(ConfigError, match="has no layer of class Experts"):
        one.set_moe_leaf_modules(model)
