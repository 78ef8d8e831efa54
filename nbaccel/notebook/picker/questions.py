"""What is trained and on what: a model and a machine, as the form describes them.

Read from the module and the inventory in milliseconds, without torch: the form shows it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.memory.model_size import refuse_unsized
from nbaccel.plan import Inventory, Plan, registry

__all__ = [
    "MachinePart",
    "TrainedModel",
    "check_model_and_batch",
    "describe_batch",
    "describe_model",
    "machine_parts",
    "samples_sentence",
]

_MAX_SINGLE_UNITS = 4  # more equal ones are described together
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model in numbers.

    Attributes:
        name: The name of its class.
        num_parameters: Elements of all parameters, tied ones once.
        num_tensors: Parameters, tied ones once.
        layers: Its repeated layers, ``32 LlamaDecoderLayer``; empty where none is repeated.
        formats: The number formats of its parameters, the most frequent first.
        num_tied: How many names share the tensor of another name.
        is_on_meta: Whether it has shapes only, and no memory.
    """

    name: str
    num_parameters: int
    num_tensors: int
    layers: str
    formats: tuple[str, ...]
    num_tied: int
    is_on_meta: bool

    def facts(self) -> str:
        """The numbers in one line."""
        tied_text = f"{count_noun(self.num_tied, 'tied weight')}" if self.num_tied else ""
        parameters_text = (
            f"{_short_count(self.num_parameters)} parameters in "
            f"{count_noun(self.num_tensors, 'tensor')}"
        )
        meta_text = "on meta: shapes only" if self.is_on_meta else ""
        formats_text = ", ".join(self.formats)
        return " · ".join(
            filter(None, (parameters_text, self.layers, formats_text, tied_text, meta_text))
        )


@dataclass(frozen=True, slots=True)
class MachinePart:
    """A device, the host's memory or its cores.

    Attributes:
        label: What it is, and how much of it is free.
        is_used: Whether the run computes on it.
    """

    label: str
    is_used: bool


def describe_model(module: Any) -> TrainedModel:
    """Count a model."""
    named_parameters = list(module.named_parameters(remove_duplicate=False))
    # By id, not by address: all tensors on `meta` have the address 0.
    distinct_parameters = {id(parameter): parameter for _, parameter in named_parameters}.values()
    format_sizes: Counter[str] = Counter()
    for parameter in distinct_parameters:
        format_sizes[str(parameter.dtype).removeprefix("torch.")] += int(parameter.numel())
    return TrainedModel(
        name=type(module).__name__,
        num_parameters=sum(format_sizes.values()),
        num_tensors=len(distinct_parameters),
        layers=_repeated_layers(module),
        formats=tuple(format_name for format_name, _ in format_sizes.most_common()),
        num_tied=len(named_parameters) - len(distinct_parameters),
        is_on_meta=any(bool(parameter.is_meta) for parameter in distinct_parameters),
    )


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
    unit_texts = [_unit_size(unit.total_bytes, unit.free_bytes) for unit in units]
    described_units = [
        (unit.kind, unit.name, unit_text, unit_number < num_used)
        for unit_number, (unit, unit_text) in enumerate(zip(units, unit_texts, strict=True))
    ]
    parts: list[MachinePart] = []
    unit_number = 0
    for (kind, name, unit_text, is_used), equal_units in groupby(described_units):
        num_equal = len(list(equal_units))
        noun = device_row(kind).noun
        numbers = [f"{noun} {unit_number + step}" for step in range(num_equal)]
        if num_equal > _MAX_SINGLE_UNITS:
            numbers = [f"{noun} {unit_number} to {unit_number + num_equal - 1}"]
        parts += [MachinePart(f"{number} · {name}{unit_text}", is_used) for number in numbers]
        unit_number += num_equal
    computes_on_host = num_used == 0
    host_text = _unit_size(inventory.host_total_bytes, inventory.host_available_bytes)
    return (
        *parts,
        MachinePart(f"host memory{host_text}", computes_on_host),
        MachinePart(count_noun(inventory.cpu_cores, "core"), computes_on_host),
    )


def samples_sentence(per_process: int, accumulated: int, world_size: int) -> str:
    """The samples of one optimizer step."""
    total = per_process * accumulated * world_size
    factors = [f"{per_process} per process"]
    factors += [f"{accumulated} accumulated"] if accumulated > 1 else []
    factors += [f"{world_size} processes"] if world_size > 1 else []
    if len(factors) == 1:
        return f"{count_noun(total, 'sample')} per step."
    return f"{count_noun(total, 'sample')} per step: {' * '.join(factors)}."


def _unit_size(total_bytes: int, free_bytes: int) -> str:
    if not total_bytes:
        return ""
    total_text = format_bytes(total_bytes)
    free_text = format_bytes(free_bytes)
    # The same unit twice says nothing: "80.0 GiB, 78.0 free".
    return f" · {total_text}, {free_text.removesuffix(total_text[-4:])} free"


def _repeated_layers(module: Any) -> str:
    """The kind of child that stands most often below one parent, if it has parameters."""
    best_count = 1
    best_name = ""
    for parent_module in module.modules():
        kinds = Counter(
            type(child_module).__name__
            for child_module in parent_module.children()
            if next(iter(child_module.parameters()), None) is not None
        )
        for kind_name, kind_count in kinds.most_common(1):
            if kind_count > best_count:
                best_count = kind_count
                best_name = kind_name
    return f"{best_count} {best_name}" if best_name else ""


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
