from __future__ import annotations

import pytest

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.notebook.picker.choices import PANELS, by_name, settings


def test_every_setting_is_a_choice():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields >= set(RunConfig.model_fields) - {"deepspeed", "zero_stage"}
    landed = {s.run_field.removeprefix("fp8.") for s in settings("precision") if "fp8." in s.name}
    assert landed == set(Fp8Config.model_fields)


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
        "compare",
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


@pytest.mark.parametrize("panel", PANELS)
def test_names_are_unique(panel):
    names = [setting.name for setting in settings(panel)]
    assert len(names) == len(set(names))
