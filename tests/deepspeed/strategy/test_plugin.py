"""`DeepSpeedPlugin`: what was said in several places becomes one configuration, or a refusal."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, RunConfig, notebook_launcher
from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.deepspeed.plugin import Plugins
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.deepspeed.zero_memory import check_host_memory, estimate_memory
from nbaccel.errors import ConfigError, MissingBackend, PlatformUnsupported
from nbaccel.plan import inspect_machine
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


STAGE_2 = {"zero_optimization": {"stage": 2}}


def test_nothing_said_is_stage_2_with_open_sizes():
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config == {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    assert plugin.is_auto("train_batch_size")
    assert plugin.get_value("zero_optimization.stage") == plugin.zero_stage == 2
    assert plugin.get_value("zero_optimization.stge", 7) == 7


def test_arguments_become_keys():
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="cpu",
        offload_param_device="nvme",
        offload_param_nvme_path="/fast",
        gradient_clipping=0.5,
        gradient_accumulation_steps=4,
        zero3_save_16bit_model=True,
    )
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/fast"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert plugin.said["gradient_accumulation_steps"] == 4
    assert plugin.get_value("gradient_clipping") == 0.5


@pytest.mark.parametrize(
    "form", ["dict", "file", "json", "base64", "ZeroConfig", "HfDeepSpeedConfig"]
)
def test_a_configuration_comes_in_many_forms(form, tmp_path):
    given = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 3}
    text = json.dumps(given)
    (tmp_path / "ds.json").write_text(text)
    forms = {
        "dict": given,
        "file": str(tmp_path / "ds.json"),
        "json": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "ZeroConfig": ZeroConfig.from_dict(given),
        "HfDeepSpeedConfig": SimpleNamespace(config=given),
    }
    plugin = DeepSpeedPlugin(hf_ds_config=forms[form])
    assert (plugin.zero_stage, plugin.said["gradient_accumulation_steps"]) == (1, 3)
    assert given == {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 3}


def test_the_configuration_answers_as_accelerates_does():
    plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")
    asked = plugin.hf_ds_config
    assert asked.config is plugin.deepspeed_config
    assert (asked.is_zero3(), asked.is_zero2(), asked.is_offload()) == (True, False, True)
    assert asked.get_value("zero_optimization.stage") == 3
    assert asked.get_value("bf16.enabled") is None
    asked.config["bf16"] = {"enabled": True}
    assert asked.is_true("bf16.enabled")
    assert not asked.is_false("bf16.enabled")
    assert not asked.is_false("fp16.enabled")
    again = copy.deepcopy(plugin)
    assert again.hf_ds_config.config is again.deepspeed_config
    assert dataclasses.replace(plugin, gradient_accumulation_steps=None) == plugin
    stage_2 = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})
    assert stage_2.hf_ds_config.is_zero2()
    assert not stage_2.hf_ds_config.is_offload()


def test_arguments_fill_what_the_file_leaves_open_and_contradict_the_rest():
    config = {"zero_optimization": {"stage": "auto"}, "gradient_clipping": 1.0}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero_stage=3, offload_optimizer_device="cpu")
    assert plugin.zero_stage == 3
    assert plugin.get_value("zero_optimization.offload_optimizer.device") == "cpu"
    with pytest.raises(ConfigError) as error:
        DeepSpeedPlugin(
            hf_ds_config={**STAGE_2, **config, **STAGE_2}, zero_stage=3, gradient_clipping=0.1
        )
    assert len(error.value.mistakes) == 2
    assert "zero_stage=3) contradicts" in str(error.value)
    assert "gradient_clipping is 1.0" in str(error.value)


def test_variables_of_the_launcher_are_read_and_arguments_win(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.3")
    assert DeepSpeedPlugin().zero_stage == 3
    assert DeepSpeedPlugin(zero_stage=1).zero_stage == 1
    assert DeepSpeedPlugin(hf_ds_config=STAGE_2).zero_stage == 2
    assert DeepSpeedPlugin().get_value("gradient_clipping") == 0.3
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two")
    with pytest.raises(ConfigError, match=r"ACCELERATE_DEEPSPEED_ZERO_STAGE='two'.*zero_stage"):
        DeepSpeedPlugin()


def test_what_cannot_be_read_or_served():
    with pytest.raises(ConfigError, match=r"cannot be read from JSON"):
        DeepSpeedPlugin(hf_ds_config='{"zero_optimization": ')
    with pytest.raises(ConfigError, match="names train_batch_size more than once"):
        DeepSpeedPlugin(hf_ds_config='{"train_batch_size": 8, "train_batch_size": 16}')
    with pytest.raises(ConfigError, match=r"/no/such"):
        DeepSpeedPlugin(hf_ds_config="/no/such.json")
    with pytest.raises(PlatformUnsupported, match=r"(?s)enable_msamp=True.*mixed_precision='fp8'"):
        DeepSpeedPlugin(enable_msamp=True)
    plugin = DeepSpeedPlugin(
        hf_ds_config={"bfloat16": {"enabled": "true"}, "zero_optimization": {"stage": "3"}}
    )
    assert (plugin.said["mixed_precision"], plugin.zero_stage) == ("bf16", 3)
    with pytest.raises(ConfigError, match="are both true"):
        DeepSpeedPlugin(hf_ds_config={"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match="bf16 must be a section"):
        DeepSpeedPlugin(hf_ds_config={"bf16": True})
    with pytest.raises(ConfigError, match="names settings by text"):
        DeepSpeedPlugin(hf_ds_config={1: 2})


# ---------------------------------------------------------------------- with an Accelerator
def test_the_plan_says_deepspeed_whoever_asks_for_it_and_nothing_is_begun(monkeypatch):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), cpu=True)
    assert accelerator.plan.strategy == "deepspeed"
    assert accelerator.distributed_type == "DEEPSPEED"
    assert accelerator.state.deepspeed_plugin is accelerator.deepspeed_plugin
    assert "ds_config: " in repr(accelerator.state)
    assert accelerator.deepspeed_config["zero_optimization"] == {"stage": 1}
    assert not torch.distributed.is_initialized()
    config = RunConfig(zero_stage=2, device="cpu")
    assert Accelerator(config=config).deepspeed_plugin.zero_stage == 2
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert Accelerator(cpu=True).deepspeed_plugin.zero_stage == 2


def test_several_plugins_by_name_and_one_in_force():
    plugins = {"a": DeepSpeedPlugin(zero_stage=1), "b": DeepSpeedPlugin(zero_stage=2)}
    for accelerator in (
        Accelerator(deepspeed_plugins=plugins, cpu=True),
        Accelerator(deepspeed_plugin=plugins, cpu=True),
    ):
        assert accelerator.deepspeed_plugin is plugins["a"]
        assert accelerator.state.deepspeed_plugins == plugins
        accelerator.state.select_deepspeed_plugin("b")
        assert accelerator.deepspeed_plugin is accelerator.state.deepspeed_plugin is plugins["b"]
        assert accelerator.state.get_deepspeed_plugin("a") is plugins["a"]
        with pytest.raises(ConfigError, match=r"no DeepSpeed plugin named 'c'.*'a', 'b'"):
            accelerator.state.select_deepspeed_plugin("c")
    with pytest.raises(ConfigError, match=r"deepspeed_plugin got \{'default': 3\}"):
        Accelerator(deepspeed_plugin=3, cpu=True)
    with pytest.raises(ConfigError, match=r"no DeepSpeed plugins in a run of type NO"):
        Accelerator(cpu=True).state.select_deepspeed_plugin("a")


def test_a_file_says_precision_and_accumulation_and_contradicts_the_call():
    config = {**STAGE_2, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4
    plugin = DeepSpeedPlugin(hf_ds_config={**STAGE_2, "bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16' contradicts.*'bf16'"):
        Accelerator(deepspeed_plugin=plugin, mixed_precision="fp16", cpu=True)
    plugin = DeepSpeedPlugin(hf_ds_config={**STAGE_2, "gradient_accumulation_steps": 4})
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, cpu=True)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"is 4 in the file and 2 by the run"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match=r"each shards models in its own way"):
        Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(),
            fsdp_plugin=FullyShardedDataParallelPlugin(),
            cpu=True,
        )


# ----------------------------------------------------------------------------- host memory
def machine(total: int, available: int):
    return replace(inspect_machine(), host_total_bytes=total, host_available_bytes=available)


def test_too_little_host_memory_is_said_before_the_system_kills_anybody():
    model = nn.Linear(1000, 1000, device="meta")  # 1 001 000 parameters
    config = ZeroConfig(stage=2, offload_optimizer="cpu")

    def check(total: int, available: int) -> None:
        here = machine(total, available)
        need = estimate_memory(model, config, num_processes=2, inventory=here)
        check_host_memory(need, "cuda", here)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(1 << 30, 30 << 20)
    with pytest.warns(UserWarning, match=r"may kill it.*offload_optimizer\.device"):
        check(1 << 30, 1 << 20)
    with pytest.raises(ConfigError, match=r"MiB of host memory for 2 process.*nbaccel\.advise"):
        check(2 << 20, 1 << 20)


def test_a_launch_at_a_stage_is_refused_where_the_tools_are_missing(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(MissingBackend, match=r"needs ninja"):
        notebook_launcher(print, config=RunConfig(num_processes=2, zero_stage=2))
