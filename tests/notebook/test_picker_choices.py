from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.deepspeed.config import ZeroConfig
from nbaccel.deepspeed.section import section_of
from nbaccel.notebook.picker_choices import (
    PANELS,
    README_BEGIN,
    README_END,
    by_name,
    readme_choices,
    settings,
)
from tests.deepspeed import needs

README = Path(__file__).parents[2] / "README.md"


def keys(model=ZeroConfig, path=""):
    for name, entry in model.model_fields.items():
        inner = section_of(entry)
        if inner is not None:
            yield from keys(inner, f"{path}{name}.")
        elif name != "extra":
            yield f"{path}{name}"


def test_every_setting_and_key_is_a_choice():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields == set(RunConfig.model_fields)
    landed = {s.run_field.removeprefix("fp8.") for s in settings("precision") if "fp8." in s.name}
    assert landed == set(Fp8Config.model_fields)
    known = ", ".join(s.deepspeed_key for s in by_name().values())
    missing = [key for key in keys() if key.rpartition(".")[2] not in known]
    assert not missing


def test_each_says_what_it_means_and_a_number_in_which_unit():
    without_unit = {
        # Ratios, counts of what the meaning names, and names that happen to be numbers.
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "gradient_predivide_factor",
        "fp16.loss_scale",
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "activation_checkpointing.number_checkpoints",
        "checkpoint.writer.io_multiplier",
        "flops_profiler.recompute_fwd_factor",
        "flops_profiler.module_depth",
        "flops_profiler.top_modules",
        "node_rank",
        "use_port",
    }
    for setting in by_name().values():
        assert setting.meaning.endswith("."), setting.name
        assert len(setting.meaning) < 160, setting.name
        assert setting.label
        if setting.kind in ("whole", "number") and not setting.unit:
            assert setting.name in without_unit
        assert bool(setting.options) == (setting.kind == "one-of"), setting.name


def test_common_ones_come_first():
    for panel in PANELS:
        sections = [setting.section for setting in settings(panel)]
        assert sections == sorted(sections, key=bool)
        assert 1 <= sections.count("") <= 15


@needs.DEEPSPEED
def test_defaults_are_those_of_the_installed_deepspeed():
    from nbaccel.deepspeed.schema import deepspeed_schema, quiet

    with quiet():
        models = deepspeed_schema().models
    for setting in settings("zero"):
        section, _, key = setting.name.rpartition(".")
        if setting.default is None or section not in models:
            continue
        theirs = models[section].model_fields.get(key)
        if theirs is not None:
            assert setting.default == theirs.default, setting.name


def test_the_readme_shows_where_each_lands():
    text = README.read_text(encoding="utf-8")
    block = text.partition(README_BEGIN)[2].partition(README_END)[0]
    assert block.strip() == readme_choices()
    for name in by_name():
        setting = by_name()[name]
        assert f"`{setting.run_field}`" in block


@pytest.mark.parametrize("panel", PANELS)
def test_names_are_unique(panel):
    names = [setting.name for setting in settings(panel)]
    assert len(names) == len(set(names))
