"""Choices read from a `RunConfig` and written into a new one, with what must change with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.memory.settings_form import Edit, Setting, SettingsForm, settings_forms
from nbaccel.notebook.picker.choices import FP8, form_of


def value_of(config: RunConfig, setting: Setting) -> Any:
    """The value of a choice in a configuration."""
    form = form_of(setting.name)
    if form is not None:
        return form.value_of(config, setting)
    if setting.name.startswith(FP8):
        return getattr(config.fp8 or Fp8Config(), setting.name.removeprefix(FP8))
    return getattr(config, setting.run_field)


def edit_config(
    config: RunConfig,
    setting: Setting,
    new_value: Any,
    *,
    device: str,
    earlier_configs: Mapping[SettingsForm, RunConfig],
) -> Edit:
    """A configuration with another value for a choice."""
    new_value = _as_typed(setting, new_value)
    form = form_of(setting.name)
    if form is not None:
        edit = form.edited(config, setting, new_value, before=earlier_configs.get(form))
    else:
        # A cleared field stands for the default, which need not be None.
        value = setting.default if new_value in (None, "") else new_value
        edit = Edit(_with_value(config, setting.name, value))
    for other_form in settings_forms():
        # Settings of the run can contradict a strategy's own, so all chosen forms are asked.
        if other_form.is_chosen(edit.config) and not setting.name.startswith(FP8):
            other_form.check(edit.config, device)
    return edit


def _with_value(config: RunConfig, name: str, value: Any) -> RunConfig:
    if not name.startswith(FP8):
        return config.changed(**{name: value})
    fp8_config = config.fp8 or Fp8Config()
    return config.changed(fp8=fp8_config.changed(**{name.removeprefix(FP8): value}))


def _as_typed(setting: Setting, value: Any) -> Any:
    """A number, in the ways people type one: ``5e8``, ``500_000_000``, ``500,000,000``."""
    if not isinstance(value, str) or setting.kind not in ("whole", "number"):
        return value
    text = value.strip().replace("_", "").replace(",", "")
    try:
        number = float(text)
    except ValueError:
        return value.strip()  # "auto", or something for the validator to refuse
    return int(number) if number.is_integer() and setting.kind == "whole" else number
