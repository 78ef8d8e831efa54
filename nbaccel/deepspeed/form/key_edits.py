"""A run with another ZeRO stage or another key, and what must change beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig, nested_keys
from nbaccel.deepspeed.form.key_settings import OPTIMIZER_PLACE, PARAM_PLACE
from nbaccel.deepspeed.zero_config import ZERO
from nbaccel.memory.settings_form import Edit

_PLACE_CONTENTS = {OPTIMIZER_PLACE: "optimizer state", PARAM_PLACE: "parameters"}


def with_stage(
    run_config: RunConfig, stage: int | None, earlier_settings: Mapping[str, Any]
) -> Edit:
    """A run with another ZeRO stage."""
    if stage is None:
        return Edit(run_config.changed(zero_stage=None, deepspeed=None))
    config_settings = copy.deepcopy(dict(run_config.deepspeed or {}))
    # Turning DeepSpeed off and on again must not lose what was set before.
    if not run_config.uses_deepspeed:
        config_settings = copy.deepcopy(dict(earlier_settings))
    run_edit = Edit(run_config)
    if stage < 3 and nested_keys.has_key(config_settings, PARAM_PLACE):
        nested_keys.drop_at(config_settings, f"{ZERO}.offload_param")
        run_edit.remarks += (f"Parameters stay on the device: stage {stage} cannot offload them.",)
    if stage == 0 and nested_keys.has_key(config_settings, OPTIMIZER_PLACE):
        nested_keys.drop_at(config_settings, f"{ZERO}.offload_optimizer")
        run_edit.remarks += ("Optimizer state stays on the device: stage 0 cannot offload it.",)
    elif stage < 3 and nested_keys.value_at(config_settings, OPTIMIZER_PLACE) == "nvme":
        nested_keys.put_at(config_settings, OPTIMIZER_PLACE, "cpu")
        nested_keys.drop_at(config_settings, f"{ZERO}.offload_optimizer.nvme_path")
        run_edit.remarks += (f"Optimizer state goes to the CPU: stage {stage} cannot use NVMe.",)
    run_edit.config = run_config.changed(zero_stage=stage, deepspeed=config_settings)
    return run_edit


def with_key(config: RunConfig, config_key: str, value: Any) -> Edit:
    """A run with another value for a key of DeepSpeed."""
    config_settings = copy.deepcopy(dict(config.deepspeed or {}))
    remarks: tuple[str, ...] = ()
    if value in (None, ""):
        nested_keys.drop_at(config_settings, config_key)
    else:
        nested_keys.put_at(config_settings, config_key, value)
    if config_key in _PLACE_CONTENTS:
        section_path = config_key.rpartition(".")[0]
        if value in (None, "none"):
            nested_keys.drop_at(config_settings, section_path)
        # DeepSpeed requires a folder, and a form must not hold a run that would be refused.
        elif value == "nvme" and not nested_keys.value_at(
            config_settings, f"{section_path}.nvme_path"
        ):
            folder = str(Path.cwd() / "nvme_offload")
            nested_keys.put_at(config_settings, f"{section_path}.nvme_path", folder)
            remarks += (
                f"Files of {_PLACE_CONTENTS[config_key]} go to {folder}: change it to a fast disk.",
            )
        elif value == "cpu":
            nested_keys.drop_at(config_settings, f"{section_path}.nvme_path")
    if config_key in ("optimizer.type", "scheduler.type") and value is not None:
        part_name = config_key.partition(".")[0]
        dummy_name = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[part_name]
        remarks += (f"DeepSpeed makes the {part_name}: give prepare a {dummy_name} in its place.",)
    # Without a type its parameters have no meaning.
    elif config_key in ("optimizer.type", "scheduler.type"):
        config_settings.pop(config_key.partition(".")[0], None)
    return Edit(config.changed(deepspeed=config_settings), remarks)
