"""What a setting comes to: the value that an open one will have, and who decides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nbaccel.notebook.picker.choices import form_of

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.notebook.picker.model import PickerModel

_OPEN_VALUES = (None, "auto", "")
# Units that are not the plural with its `s` removed.
_SINGULAR_UNITS = {"processes": "process", "batches": "batch", "powers of two": "power of two"}
TRUTH_WORDS = {True: "yes", False: "no"}


class SettingOutcome(NamedTuple):
    """What an open setting comes to, with its unit, and who decides it, or why."""

    value: str = ""
    reason: str = ""

    def text(self) -> str:
        """``2 processes: one per GPU, 2 found``; empty where nothing is left open."""
        return ": ".join(filter(None, (self.value, self.reason)))


# What settings without a value come to, where neither the plan nor a default says so.
_WHEN_EMPTY = {
    "gradient_accumulation_steps": SettingOutcome("1 batch", "unless the code accumulates"),
    "timeout": SettingOutcome("no limit"),
    "shown_output": SettingOutcome("both streams"),
}
_NOTHING_KINDS = ("text", "table", "words")


def outcome_of(model: PickerModel, setting: Setting) -> SettingOutcome:
    """What an open setting comes to."""
    if model.value(setting.name) not in _OPEN_VALUES:
        return SettingOutcome()
    for choice in model.resolved():
        if choice.name in (setting.name, setting.strategy_key):
            is_decided = choice.value not in _OPEN_VALUES
            value_text = value_with_unit(choice.value, setting.unit) if is_decided else ""
            return SettingOutcome(value_text, choice.reason)
    default_text = default_text_of(model, setting)
    if default_text:
        return SettingOutcome(default_text, "default")
    if setting.name in _WHEN_EMPTY:
        return _WHEN_EMPTY[setting.name]
    is_of_run = form_of(setting.name) is None and model.value(setting.name) is None
    return SettingOutcome("none" if is_of_run and setting.kind in _NOTHING_KINDS else "")


def default_text_of(model: PickerModel, setting: Setting) -> str:
    """The value that a setting has by default, with its unit."""
    form = form_of(setting.name)
    default = setting.default if form is None else form.default_of(model.config, setting)
    return "" if default in _OPEN_VALUES else value_with_unit(default, setting.unit)


def shown_value(model: PickerModel, name: str) -> str:
    """What a setting is, or comes to, in words."""
    value = model.value(name)
    setting = model.setting(name)
    for option in setting.options:
        if option.value == value:
            return option.label
    if value is None:
        return outcome_of(model, setting).value or "default"
    return value_with_unit(value, setting.unit if setting.kind != "one-of" else "")


def value_with_unit(value: Any, unit_name: str) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return TRUTH_WORDS[value]
    if not isinstance(value, (int, float)):
        return str(value)
    if value == 1:
        unit_name = _SINGULAR_UNITS.get(
            unit_name, unit_name.removesuffix("s") if len(unit_name) > 1 else unit_name
        )
    return f"{value:,} {unit_name}".rstrip()
