"""Choices read from a `RunConfig` and written into a new one, with what must change with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.memory.settings_form import Edit, Setting, SettingsForm, settings_forms
from nbaccel.notebook.picker.choices import GEMM_PASSES, form_of

_FP8 = "fp8."
_PASS_NAMES = tuple(GEMM_PASSES)


def value_of(config: RunConfig, setting: Setting) -> Any:
    """The value of a choice in a configuration."""
    setting_name = setting.name
    if setting_name.startswith(_FP8):
        fp8_config = config.fp8 or Fp8Config()
        field_name = setting_name.removeprefix(_FP8)
        pass_name = field_name.removeprefix("override_")
        if pass_name in _PASS_NAMES:
            return fp8_config.override_linear_precision[_PASS_NAMES.index(pass_name)]
        return getattr(fp8_config, field_name)
    form = form_of(setting_name)
    return getattr(config, setting.run_field) if form is None else form.value_of(config, setting)


def edit_config(
    config: RunConfig,
    setting: Setting,
    new_value: Any,
    *,
    device: str,
    earlier_configs: Mapping[SettingsForm, RunConfig],
) -> Edit:
    """A configuration with another value for a choice."""
    setting_name = setting.name
    new_value = _as_typed(setting, new_value)
    if setting_name.startswith(_FP8):
        return Edit(_with_fp8(config, setting_name.removeprefix(_FP8), new_value))
    owning_form = form_of(setting_name)
    if owning_form is None:
        edit = Edit(config.changed(**{setting.run_field: _or_default(setting, new_value)}))
    else:
        edit = owning_form.edited(
            config, setting, new_value, before=earlier_configs.get(owning_form)
        )
    for other_form in settings_forms():
        # Settings of the run can contradict a strategy's own, so all chosen forms are asked.
        if other_form.is_chosen(edit.config):
            other_form.check(edit.config, device)
    return edit


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


def _or_default(setting: Setting, value: Any) -> Any:
    """A cleared field stands for the default, which need not be None."""
    return setting.default if value in (None, "") else value


def _with_fp8(config: RunConfig, field_name: str, new_value: Any) -> RunConfig:
    fp8_config = config.fp8 or Fp8Config()
    pass_name = field_name.removeprefix("override_")
    if pass_name in _PASS_NAMES:
        pass_flags = list(fp8_config.override_linear_precision)
        pass_flags[_PASS_NAMES.index(pass_name)] = bool(new_value)
        return config.changed(fp8=fp8_config.changed(override_linear_precision=tuple(pass_flags)))
    default_value = Fp8Config.model_fields[field_name].default
    return config.changed(
        fp8=fp8_config.changed(
            **{field_name: default_value if new_value in (None, "") else new_value}
        )
    )
