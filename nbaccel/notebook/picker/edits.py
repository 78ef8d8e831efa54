"""Choices read from a `RunConfig` and written into a new one, with what must change beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.config import Fp8Config, RunConfig, dotted
from nbaccel.config.engine import engine_config
from nbaccel.deepspeed.combinations import combination_mistakes
from nbaccel.deepspeed.config import ZERO, ZeroConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import OPTIMIZER_PLACE, PARAM_PLACE, Setting
from nbaccel.notebook.picker.words import PASSES

__all__ = ["Edit", "edited", "value_of"]

_FP8 = "fp8."
_PASSES = tuple(PASSES)
_PLACES = {OPTIMIZER_PLACE: "optimizer state", PARAM_PLACE: "parameters"}


@dataclass(slots=True)
class Edit:
    """A configuration in the making.

    Attributes:
        config: The configuration.
        remarks: What was changed beside what was asked for.
    """

    config: RunConfig
    remarks: tuple[str, ...] = ()


def value_of(config: RunConfig, setting: Setting) -> Any:
    """What a configuration holds for a choice.

    Args:
        config: The configuration.
        setting: The choice.

    Returns:
        The value; None where it is left open.
    """
    name = setting.name
    if name.startswith(_FP8):
        fp8 = config.fp8 or Fp8Config()
        last = name.removeprefix(_FP8)
        which = last.removeprefix("override_")
        if which in _PASSES:
            return fp8.override_linear_precision[_PASSES.index(which)]
        return getattr(fp8, last)
    if name == "zero_stage":
        return config.zero_stage if config.uses_deepspeed else None
    if setting.run_field != "deepspeed":
        return getattr(config, setting.run_field)
    found = dotted.value_at(config.deepspeed, setting.deepspeed_key)
    return None if name in _PLACES and found == "none" else found


def edited(
    config: RunConfig, setting: Setting, value: Any, *, device: str, shelf: Mapping[str, Any]
) -> Edit:
    """A configuration with another value for a choice.

    Args:
        config: The configuration; it stays as it is.
        setting: The choice.
        value: Its new value; None leaves it open.
        device: What the processes compute on.
        shelf: A DeepSpeed configuration that is taken up again where DeepSpeed is chosen anew.

    Returns:
        The new one, and what else was changed.

    Raises:
        ConfigError: The value is wrong, or cannot go with the others.
    """
    name, value = setting.name, _as_typed(setting, value)
    if name.startswith(_FP8):
        return Edit(_with_fp8(config, name.removeprefix(_FP8), value))
    if name == "zero_stage":
        edit = _with_stage(config, value, shelf)
    elif setting.run_field != "deepspeed":
        edit = Edit(config.changed(**{setting.run_field: _or_default(setting, value)}))
    elif not config.uses_deepspeed:
        raise ConfigError(
            f"{name}={value!r} is for DeepSpeed, which is off. Nothing would read it. Choose a "
            "ZeRO stage first."
        )
    else:
        edit = _with_key(config, name, value)
    if edit.config.uses_deepspeed:
        _check(edit.config, device)
    return edit


def _as_typed(setting: Setting, value: Any) -> Any:
    """A number for what people type as one: ``5e8``, ``500_000_000``, ``500,000,000``."""
    if not isinstance(value, str) or setting.kind not in ("whole", "number"):
        return value
    text = value.strip().replace("_", "").replace(",", "")
    try:
        number = float(text)
    except ValueError:
        return value.strip()  # "auto", or something for the validator to refuse
    return int(number) if number.is_integer() and setting.kind == "whole" else number


def _or_default(setting: Setting, value: Any) -> Any:
    """A cleared field stands for the default, which need not be None."""
    return setting.default if value in (None, "") else value


def _with_fp8(config: RunConfig, name: str, value: Any) -> RunConfig:
    fp8 = config.fp8 or Fp8Config()
    which = name.removeprefix("override_")
    if which in _PASSES:
        flags = list(fp8.override_linear_precision)
        flags[_PASSES.index(which)] = bool(value)
        return config.changed(fp8=fp8.changed(override_linear_precision=tuple(flags)))
    default = Fp8Config.model_fields[name].default
    return config.changed(fp8=fp8.changed(**{name: default if value in (None, "") else value}))


def _with_stage(config: RunConfig, stage: int | None, shelf: Mapping[str, Any]) -> Edit:
    if stage is None:
        return Edit(config.changed(zero_stage=None, deepspeed=None))
    settings = copy.deepcopy(dict(config.deepspeed or {}))
    if not config.uses_deepspeed:
        settings = copy.deepcopy(dict(shelf))
    edit = Edit(config)
    if stage < 3 and dotted.has(settings, PARAM_PLACE):
        dotted.drop(settings, f"{ZERO}.offload_param")
        edit.remarks += (f"Parameters stay on the device: stage {stage} cannot offload them.",)
    if stage == 0 and dotted.has(settings, OPTIMIZER_PLACE):
        dotted.drop(settings, f"{ZERO}.offload_optimizer")
        edit.remarks += ("Optimizer state stays on the device: stage 0 cannot offload it.",)
    elif stage < 3 and dotted.value_at(settings, OPTIMIZER_PLACE) == "nvme":
        dotted.put(settings, OPTIMIZER_PLACE, "cpu")
        dotted.drop(settings, f"{ZERO}.offload_optimizer.nvme_path")
        edit.remarks += (f"Optimizer state goes to the CPU: stage {stage} cannot use NVMe.",)
    edit.config = config.changed(zero_stage=stage, deepspeed=settings)
    return edit


def _with_key(config: RunConfig, key: str, value: Any) -> Edit:
    settings = copy.deepcopy(dict(config.deepspeed or {}))
    remarks: tuple[str, ...] = ()
    if value in (None, ""):
        dotted.drop(settings, key)
    else:
        dotted.put(settings, key, value)
    if key in _PLACES:
        section = key.rpartition(".")[0]
        if value in (None, "none"):
            dotted.drop(settings, section)
        elif value == "nvme" and not dotted.value_at(settings, f"{section}.nvme_path"):
            folder = str(Path.cwd() / "nvme_offload")
            dotted.put(settings, f"{section}.nvme_path", folder)
            remarks += (f"Files of {_PLACES[key]} go to {folder}: change it to a fast disk.",)
        elif value == "cpu":
            dotted.drop(settings, f"{section}.nvme_path")
    if key in ("optimizer.type", "scheduler.type") and value is not None:
        kind = key.partition(".")[0]
        dummy = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[kind]
        remarks += (f"DeepSpeed makes the {kind}: prepare a {dummy} in the place of yours.",)
    elif key in ("optimizer.type", "scheduler.type"):
        settings.pop(key.partition(".")[0], None)
    return Edit(config.changed(deepspeed=settings), remarks)


def _check(config: RunConfig, device: str) -> None:
    """Refuse what is no value of its key, and what cannot go together."""
    settings = ZeroConfig.from_dict(engine_config(config) or {})
    # Whether a CPU computes in float16 is asked of DeepSpeed, which takes seconds to import: what
    # is launched with it is checked then.
    mistakes = [*combination_mistakes(settings, device="cuda" if device == "cpu" else device)]
    if mistakes:
        raise ConfigError(*mistakes)
