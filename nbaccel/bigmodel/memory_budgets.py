"""How much of a model each device may hold: budgets as given, as the machine has them, balanced.

Nothing here initialises a device: free memory is read where the driver and the kernel publish it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.units import parse_bytes
from nbaccel.bigmodel.module_sizes import (
    WeightFormat,
    class_names,
    compute_module_sizes,
    get_module_leaves,
)
from nbaccel.plan import registry
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory

DeviceKey = int | str
"""A tier of a device map: an accelerator's number, ``mps``, ``cpu`` or ``disk``."""

HOST = "cpu"
DISK = "disk"
NAMED_TIERS = ("mps", HOST, DISK)
"""Tiers with a name, the fastest first; ``mps`` is an accelerator that has no number."""

_USED_WHEN_ALONE = 0.9
_ROOM_PER_BLOCK = 1.25

_log = get_logger(__name__)


def is_accelerator(device: DeviceKey) -> bool:
    """Whether a tier is faster than host memory."""
    return device not in (HOST, DISK)


# ------------------------------------------------------------------------------- budgets
def get_max_memory(
    max_memory: Mapping[DeviceKey, int | float | str] | None = None,
    *,
    inventory: Inventory | None = None,
) -> dict[DeviceKey, int]:
    """Bytes that each device may hold.

    What is free is the driver's number: in a process that has used a GPU already, the context and
    all that torch has cached there count as taken. Where GPU and host share one memory (``mps``),
    the host has no entry of its own, because the same bytes would be given away twice.

    Args:
        max_memory: Budgets by device, the machine's free memory where it is None: numbers of
            accelerators, ``"mps"``, ``"cpu"`` and ``"disk"``; in bytes, or as ``"5GiB"`` (powers of
            1024) and ``"200MB"`` (powers of 1000). It is not changed.
        inventory: The machine; the one that this process runs on where it is None.

    Returns:
        Budgets in bytes: accelerators by number, then ``mps``, ``cpu`` and ``disk``. There is
        nothing for the disk that was not given.

    Raises:
        ConfigError: Keys that are no devices, and budgets that are no sizes, all of them together.
    """
    machine = inspect_machine() if inventory is None else inventory
    if max_memory is None:
        return dict(_free_memory(machine))
    mistakes = [*_mistaken_devices(max_memory)]
    parsed_budgets: dict[DeviceKey, int] = {}
    for device in sorted(max_memory, key=_tier_order):
        try:
            parsed_budgets[device] = _read_budget(max_memory[device])
        except ConfigError as error:
            mistakes.append(f"max_memory[{device!r}]: {error}")
    if mistakes:
        raise ConfigError(*mistakes)
    _report_absent(parsed_budgets, machine)
    return parsed_budgets


def _tier_order(device: Any) -> tuple[int, int]:
    is_number = isinstance(device, int)
    place = NAMED_TIERS.index(device) if device in NAMED_TIERS else len(NAMED_TIERS)
    return (0, device) if is_number else (1, place)


def _mistaken_devices(max_memory: Iterable[Any]) -> Iterator[str]:
    for device in max_memory:
        is_number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        if not is_number and device not in NAMED_TIERS:
            yield (
                f"max_memory has a budget for {device!r}, which is no device: nothing could be put "
                "there. Name accelerators by their numbers (0, 1, ...), and the others 'mps', "
                "'cpu' and 'disk'."
            )


def _read_budget(budget: float | str) -> int:
    if isinstance(budget, float) and budget >= 0:
        # What is computed from a number of bytes is a float as often as not, be it infinite.
        return int(min(budget, sys.maxsize))
    return parse_bytes(budget)  # type: ignore[arg-type]  # it refuses all but texts and whole numbers


def _report_absent(budgets: Iterable[DeviceKey], machine: Inventory) -> None:
    present = [device for device, _ in _accelerator_memory(machine)]
    absent = [device for device in budgets if is_accelerator(device) and device not in present]
    if absent:
        _log.warning(
            "max_memory names devices that are not available: %s; this machine has %s. A map that "
            "uses them can be made here, and followed only where they are.",
            absent,
            present or "no accelerator",
        )


def _free_memory(machine: Inventory) -> Iterator[tuple[DeviceKey, int]]:
    accelerator_memory = sorted(_accelerator_memory(machine), key=lambda pair: _tier_order(pair[0]))
    yield from accelerator_memory
    if all(isinstance(device, int) for device, _ in accelerator_memory):
        yield HOST, machine.host_available_bytes


def _accelerator_memory(machine: Inventory) -> Iterator[tuple[DeviceKey, int]]:
    for unit in registry.usable_units(machine):
        if unit.kind in NAMED_TIERS:
            # Its memory is the host's, and its driver counts nothing of its own.
            yield unit.kind, unit.free_bytes or machine.host_available_bytes
        else:
            yield unit.index, _driver_bytes(unit)


def _driver_bytes(unit: Gpu) -> int:
    if not unit.free_bytes and not unit.total_bytes:
        _log.warning(
            "The driver of accelerator %s (%s) does not tell its free memory, so nothing is put "
            "there. Give max_memory={%s: ...} to use it.",
            unit.index,
            unit.name,
            unit.index,
        )
    return unit.free_bytes


# ------------------------------------------------------------------------------- balance
def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, int | float | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: WeightFormat | None = None,
    special_dtypes: Mapping[str, WeightFormat] | None = None,
    low_zero: bool = False,
    *,
    inventory: Inventory | None = None,
) -> dict[DeviceKey, int]:
    """Budgets that spread a model evenly over the accelerators, instead of filling the first.

    Each gets its share of the model, and room for a block and a quarter more, because blocks do not
    end where shares do; the last keeps its whole budget. A single accelerator whose budget was not
    given is used to 90 %, so that something is left for activations.

    Args:
        model: The module; its tensors may be on ``meta``.
        max_memory: As in :func:`get_max_memory`; no budget grows. Accelerators with a budget of 0
            take no share.
        no_split_module_classes: Names of the classes of blocks that must not be split.
        dtype: As in ``compute_module_sizes``.
        special_dtypes: As in ``compute_module_sizes``.
        low_zero: Whether the first accelerator gets only what the others have no room for.
        inventory: As in :func:`get_max_memory`.

    Returns:
        Budgets in bytes, in the order of :func:`get_max_memory`.

    Raises:
        ConfigError: As in :func:`get_max_memory`.
    """
    budgets = get_max_memory(max_memory, inventory=inventory)
    sharing = [device for device, budget in budgets.items() if is_accelerator(device) and budget]
    if len(sharing) == 1 and max_memory is None:
        budgets[sharing[0]] = int(budgets[sharing[0]] * _USED_WHEN_ALONE)
    if len(sharing) < 2:
        return budgets
    module_sizes = compute_module_sizes(model, dtype, special_dtypes)
    num_shares = len(sharing) - 1 if low_zero else len(sharing)
    extra_bytes = _bytes_around_share(model, module_sizes, class_names(no_split_module_classes))
    share_bytes = int(module_sizes[""] // num_shares) + extra_bytes
    first_device, *other_devices = sharing
    for device in sharing[low_zero:-1]:
        budgets[device] = min(share_bytes, budgets[device])
    if low_zero:
        rest_bytes = module_sizes[""] - sum(budgets[device] for device in other_devices)
        budgets[first_device] = min(max(0, math.ceil(rest_bytes)), budgets[first_device])
    return budgets


def _bytes_around_share(
    model: nn.Module, module_sizes: Mapping[str, int], whole_classes: frozenset[str]
) -> int:
    """Room for the block that a share's end would cut, as large as a whole one or a mean layer."""
    block_bytes: dict[str, int] = {}
    for module_name, module in model.named_modules():
        class_name = type(module).__name__
        if module_name and class_name in whole_classes and module_name in module_sizes:
            # The first of its class stands for all: the last share takes what is larger.
            block_bytes.setdefault(class_name, module_sizes[module_name])
    tensor_names = frozenset(get_module_leaves(module_sizes))
    sizes_of_modules = {
        name: size for name, size in module_sizes.items() if name not in tensor_names
    }
    layer_names = get_module_leaves(sizes_of_modules)
    layer_bytes = sum(sizes_of_modules[name] for name in layer_names)
    mean_bytes = int(layer_bytes / max(1, len(layer_names)))
    return int(_ROOM_PER_BLOCK * max([mean_bytes, *block_bytes.values()]))
