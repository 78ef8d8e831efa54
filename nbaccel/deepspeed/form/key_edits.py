"""A run with another ZeRO stage or another key, and what must change beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig, nested_keys
from nbaccel.deepspeed.zero_memory import OPTIMIZER_PLACE, PARAM_PLACE, place_at_stage
from nbaccel.memory.settings_form import Edit

_CONTENTS = {OPTIMIZER_PLACE: "optimizer state", PARAM_PLACE: "parameters"}
_STAND_INS = {"optimizer.type": "DummyOptim", "scheduler.type": "DummyScheduler"}


def with_stage(
    run_config: RunConfig, stage: int | None, earlier_settings: Mapping[str, Any]
) -> Edit:
    """A run with another ZeRO stage."""
    if stage is None:
        return Edit(run_config.changed(zero_stage=None, deepspeed=None))
    # Turning DeepSpeed off and on again must not lose what was set before.
    settings = copy.deepcopy(
        dict((run_config.deepspeed or {}) if run_config.uses_deepspeed else earlier_settings)
    )
    remarks: tuple[str, ...] = ()
    for key, content in _CONTENTS.items():
        place = nested_keys.value_at(settings, key) or "none"
        possible = place_at_stage(key, place, stage)
        if possible != place:
            put_place(settings, key, possible)
            target = "the CPU" if possible == "cpu" else "the device"
            remarks += (f"Place of {content}: {target}, as stage {stage} cannot use {place}.",)
    return Edit(run_config.changed(zero_stage=stage, deepspeed=settings), remarks)


def with_key(config: RunConfig, key: str, value: Any) -> Edit:
    """A run with another value for a key of DeepSpeed."""
    settings = copy.deepcopy(dict(config.deepspeed or {}))
    remarks: tuple[str, ...] = ()
    part = key.partition(".")[0]
    if key in _CONTENTS:
        # DeepSpeed requires a folder, and a form must not hold a run that would be refused.
        folder = str(Path.cwd() / "nvme_offload")
        if put_place(settings, key, value, folder):
            remarks = (f"Files of {_CONTENTS[key]} go to {folder}: change it to a fast disk.",)
    elif value in (None, ""):
        nested_keys.drop_at(settings, key)
        if key in _STAND_INS:  # without a type its parameters have no meaning
            settings.pop(part, None)
    else:
        nested_keys.put_at(settings, key, value)
        if key in _STAND_INS:
            remarks = (
                f"DeepSpeed makes the {part}: give prepare a {_STAND_INS[key]} in its place.",
            )
    return Edit(config.changed(deepspeed=settings), remarks)


def put_place(settings: dict[str, Any], key: str, place: str | None, folder: str = "") -> bool:
    """Say where something is kept, with the folder that only a disk has; whether it is new."""
    section = key.rpartition(".")[0]
    path_key = f"{section}.nvme_path"
    if place in (None, "", "none") or isinstance(nested_keys.value_at(settings, section), str):
        nested_keys.drop_at(settings, section)
    if place in (None, "", "none"):
        return False
    nested_keys.put_at(settings, key, place)
    if place != "nvme":
        nested_keys.drop_at(settings, path_key)
    elif not nested_keys.value_at(settings, path_key):
        nested_keys.put_at(settings, path_key, folder)
        return True
    return False
