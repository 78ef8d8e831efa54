"""What cannot be chosen at present, and why: from the plan, the rows and the model."""

from __future__ import annotations

from typing import Any, Protocol

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.optional_packages import is_installed
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.capabilities import (
    DEVICES,
    FP8_BACKENDS,
    device_row,
    fp8_backend,
    precision_row,
)
from nbaccel.config.capability_rows import Fp8Row
from nbaccel.memory.settings_form import ChoiceOption, Setting
from nbaccel.notebook.picker.choices import FP8, form_of
from nbaccel.notebook.picker.edits import value_of
from nbaccel.plan import Inventory, registry, resolve
from nbaccel.plan.training_plan import HISTORY_SETTINGS, recipe_of

_MULTI_NODE_FIELDS = (
    "node_rank",
    "master_addr",
    "rdzv_endpoint",
    "rdzv_conf",
    "rdzv_id",
    "rdzv_backend",
)


class PickerState(Protocol):
    """What is chosen, and for what; `problems` is what the plan has against it already."""

    config: RunConfig
    inventory: Inventory
    module: Any

    @property
    def problems(self) -> tuple[str, ...]: ...  # noqa: D102


def option_refusal(view: PickerState, setting: Setting, option: ChoiceOption) -> str:
    """Why an option cannot be chosen."""
    if option.value == value_of(view.config, setting):
        return ""  # the present value stays selectable, whatever is wrong with it
    form = form_of(setting.name)
    if form is not None:
        return form.option_refusal(view.config, setting, option.value)
    if setting.name == "fp8.backend" and (missing_package := _backend_refusal(option.value)):
        return missing_package
    if setting.run_field.startswith(FP8):
        return _fp8_refusal(view, setting.run_field.removeprefix(FP8), option.value)
    if setting.run_field in RunConfig.model_fields and setting.run_field == setting.name:
        return _plan_refusal(view, setting.name, option.value)
    return ""


def setting_refusal(view: PickerState, setting: Setting) -> str:
    """Why a whole choice cannot be made."""
    if setting.name == "activation_checkpointing":
        return _switch_refusal(view)
    form = form_of(setting.name)
    return "" if form is None else form.setting_refusal(view.config, setting)


def is_shown(view: PickerState, setting: Setting) -> bool:
    """Whether a choice means anything as things are."""
    setting_name = setting.name
    if setting_name.startswith(FP8):
        if not precision_row(view.config.mixed_precision).has_backends:
            return False
        return setting_name == "fp8.backend" or _is_read(view, setting.run_field.removeprefix(FP8))
    form = form_of(setting_name)
    if form is not None:
        return form.is_shown(view.config, setting)
    if setting_name == "tpu_driver":
        return view.inventory.tpu_chips > 0
    return setting_name not in _MULTI_NODE_FIELDS or view.config.num_nodes > 1


def _fp8_row(view: PickerState) -> Fp8Row | None:
    """The backend that FP8 comes to: the one chosen, or the first that fits; None: none."""
    backend = (view.config.fp8 or Fp8Config()).backend
    named_rows = {row.name: row for row in FP8_BACKENDS}
    if backend in named_rows:
        return named_rows[backend]
    units = registry.usable_units(view.inventory)
    name = view.config.device
    if name == "auto":
        name = units[0].kind if units else DEVICES[0].name
    known = [unit.compute_capability for unit in units if unit.kind == name]
    return fp8_backend(backend, device_row(name), min(known, default=None)).row


def _is_read(view: PickerState, name: str) -> bool:
    """Whether the FP8 backend, with its recipe, reads a setting."""
    row = _fp8_row(view)
    if row is None or name not in row.settings:
        return False
    recipe = recipe_of(view.config.fp8 or Fp8Config(), row)
    return name not in HISTORY_SETTINGS or recipe == "delayed"


def _fp8_refusal(view: PickerState, name: str, new_value: Any) -> str:
    """The first problem of the plan with another setting of FP8."""
    try:
        fp8_config = (view.config.fp8 or Fp8Config()).changed(**{name: new_value})
    except ConfigError as error:
        return _first_clause(error.mistakes[0], name)
    return _plan_refusal(view, "fp8", fp8_config, f"{FP8}{name}")


def _backend_refusal(name: str) -> str:
    row = {row.name: row for row in FP8_BACKENDS}.get(name)
    if row is not None and not row.path:
        return "nothing trains with it in this version"
    if row is None or not row.package or is_installed(row.package):
        return ""
    return f"{row.package} is not installed"


def _switch_refusal(view: PickerState) -> str:
    if view.module is None:
        return ""
    from nbaccel.strategies.model_blocks import can_checkpoint_gradients

    if can_checkpoint_gradients(view.module):
        return ""
    return f"{type(view.module).__name__} has no gradient_checkpointing_enable()"


def _plan_refusal(
    view: PickerState, setting_name: str, new_value: Any, shown_name: str = ""
) -> str:
    """The first problem that the plan would have with a new value and does not have now."""
    try:
        config = view.config.changed(**{setting_name: new_value})
    except ConfigError as error:
        return _first_clause(error.mistakes[0], setting_name)
    # Problems of the present settings would grey every option.
    new_problems = [
        text for text in problems_of(config, view.inventory) if text not in view.problems
    ]
    return _first_clause(new_problems[0], shown_name or setting_name) if new_problems else ""


def problems_of(config: RunConfig, inventory: Inventory) -> tuple[str, ...]:
    """Why a machine cannot serve a configuration."""
    try:
        resolve(config, inventory)
    except ConfigError as error:
        return error.mistakes
    except NbaccelError as error:
        return (str(error),)
    return ()


def _first_clause(text: str, name: str) -> str:
    """The first sentence without its subject, which the field's label names already."""
    first_sentence = text.partition(". ")[0].replace("`", "")
    first_word, _, other_words = first_sentence.partition(" ")
    return other_words if first_word.startswith(f"{name}=") else first_sentence
