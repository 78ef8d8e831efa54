"""What cannot be chosen at present, and why; what is trained and on what, in words.

Read from the plan, the rows, the module and the inventory in milliseconds, without torch: the form
shows it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.optional_packages import is_installed
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.capabilities import (
    DEVICES,
    FP8_BACKENDS,
    device_row,
    fp8_backend,
    precision_row,
)
from nbaccel.config.capability_rows import Fp8Row
from nbaccel.memory.model_size import refuse_unsized
from nbaccel.memory.settings_form import ChoiceOption, Setting
from nbaccel.notebook.picker.choices import FP8, form_of, value_of
from nbaccel.plan import Inventory, Plan, registry, resolve
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


_MAX_SINGLE_UNITS = 4  # more equal ones are described together
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


class TrainedModel(NamedTuple):
    """A model: the name of its class, and its numbers in one line."""

    name: str
    facts: str


class MachinePart(NamedTuple):
    """A device, the host's memory or its cores, with what is free; and whether it is used."""

    label: str
    is_used: bool


def describe_model(module: Any) -> TrainedModel:
    """Count a model, tied weights once."""
    named = list(module.named_parameters(remove_duplicate=False))
    # By id, not by address: all tensors on `meta` have the address 0.
    parameters = {id(parameter): parameter for _, parameter in named}.values()
    format_sizes: Counter[str] = Counter()
    for parameter in parameters:
        format_sizes[str(parameter.dtype).removeprefix("torch.")] += int(parameter.numel())
    num_tied = len(named) - len(parameters)
    is_on_meta = any(bool(parameter.is_meta) for parameter in parameters)
    facts = (
        f"{_short_count(format_sizes.total())} parameters in "
        f"{count_noun(len(parameters), 'tensor')}",
        _repeated_layers(module),
        ", ".join(name for name, _ in format_sizes.most_common()),
        count_noun(num_tied, "tied weight") if num_tied else "",
        "on meta: shapes only" if is_on_meta else "",
    )
    return TrainedModel(type(module).__name__, " · ".join(filter(None, facts)))


def describe_batch(sample_batch: Any) -> str:
    """The shapes of a batch."""
    return ", ".join(_shapes_of(sample_batch, ""))


def machine_parts(inventory: Inventory, plan: Plan | None) -> tuple[MachinePart, ...]:
    """The machine piece by piece."""
    units = registry.usable_units(inventory)
    num_used = 0
    if plan is not None and (units_of_plan := registry.device(plan.device).units(inventory)):
        units = units_of_plan
        num_used = min(plan.num_processes, len(units_of_plan))
    described = [
        (unit.kind, f"{unit.name}{_unit_size(unit.total_bytes, unit.free_bytes)}", place < num_used)
        for place, unit in enumerate(units)
    ]
    parts: list[MachinePart] = []
    place = 0
    for (kind, text, is_used), equal_units in groupby(described):
        last = place + len(list(equal_units)) - 1
        noun = device_row(kind).noun
        numbers = [f"{noun} {number}" for number in range(place, last + 1)]
        if len(numbers) > _MAX_SINGLE_UNITS:
            numbers = [f"{noun} {place} to {last}"]
        parts += [MachinePart(f"{number} · {text}", is_used) for number in numbers]
        place = last + 1
    host_text = _unit_size(inventory.host_total_bytes, inventory.host_available_bytes)
    return (
        *parts,
        MachinePart(f"host memory{host_text}", num_used == 0),
        MachinePart(count_noun(inventory.cpu_cores, "core"), num_used == 0),
    )


def samples_sentence(per_process: int, accumulated: int, world_size: int) -> str:
    """The samples of one optimizer step."""
    total = per_process * accumulated * world_size
    factors = [f"{per_process} per process"]
    factors += [f"{accumulated} accumulated"] if accumulated > 1 else []
    factors += [count_noun(world_size, "process")] if world_size > 1 else []
    if len(factors) == 1:
        return f"{count_noun(total, 'sample')} per step."
    return f"{count_noun(total, 'sample')} per step: {' times '.join(factors)}."


def _unit_size(total_bytes: int, free_bytes: int) -> str:
    if not total_bytes:
        return ""
    total_text = format_bytes(total_bytes)
    free_text = format_bytes(free_bytes)
    # The same unit twice says nothing: "80.0 GiB, 78.0 free".
    return f" · {total_text}, {free_text.removesuffix(total_text[-4:])} free"


def _repeated_layers(module: Any) -> str:
    """The kind of child that stands most often below one parent, if it has parameters."""
    most: tuple[str, int] = ("", 1)
    for parent in module.modules():
        children = (
            one for one in parent.children() if next(iter(one.parameters()), None) is not None
        )
        for found in Counter(type(child).__name__ for child in children).most_common(1):
            most = max(most, found, key=lambda one: one[1])
    return f"{most[1]} {most[0]}" if most[0] else ""


def _shapes_of(batch_part: Any, part_name: str) -> Iterator[str]:
    if hasattr(batch_part, "shape"):
        text = str(tuple(int(size) for size in batch_part.shape))
        yield f"{part_name} {text}".strip()
    elif isinstance(batch_part, Mapping):
        for key, inner_part in batch_part.items():
            yield from _shapes_of(inner_part, str(key))
    elif isinstance(batch_part, Sequence) and not isinstance(batch_part, (str, bytes)):
        for inner_part in batch_part:
            yield from _shapes_of(inner_part, part_name)


def _short_count(number: int) -> str:
    """``6.74 B``: three digits are enough to tell models apart."""
    for size, letter in _COUNT_UNITS:
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def check_model_and_batch(model: Any, sample_batch: Any) -> None:
    """Refuse what cannot be described."""
    refuse_unsized(model)
    # By its method, because `isinstance` would import torch for a form without a model.
    if model is not None and not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={type(model).__name__} is no module: its parameters decide what fits. Give a "
            "torch module; it may be on meta."
        )
    if model is None and sample_batch is not None:
        raise ConfigError(
            f"sample_batch={type(sample_batch).__name__} was given without a model: there is "
            "nothing to call with it. Give the model, too."
        )
