"""How much each device may hold, and which block of a model goes where.

It only decides: it moves nothing and initialises no device; drivers and kernel tell free memory.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.torch_private import module_tables
from nbaccel.base.units import count_noun, format_bytes, parse_bytes
from nbaccel.bigmodel import block_packing
from nbaccel.bigmodel.module_sizes import (
    NamedPart,
    WeightFormat,
    check_tied_parameters_in_config,
    class_names,
    compute_module_sizes,
    find_tied_parameters,
    get_module_leaves,
    named_module_tensors,
    names_upwards,
    owner_in,
)
from nbaccel.bigmodel.tensor_placing import as_device
from nbaccel.memory.estimate import table_lines
from nbaccel.plan import registry
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Inventory

DeviceKey = int | str
"""A tier of a device map: an accelerator's number, ``mps``, ``cpu`` or ``disk``."""

HOST = "cpu"
DISK = "disk"
NAMED_TIERS = ("mps", HOST, DISK)
"""Tiers with a name, the fastest first; ``mps`` is an accelerator that has no number."""

_USED_WHEN_ALONE = 0.9
_ROOM_PER_BLOCK = 1.25
_BAR_CHARS = 40
_NUMBER_AT_END = re.compile(r"(.*?)(\d+)")

_log = get_logger(__name__)


def is_accelerator(device: DeviceKey) -> bool:
    """Whether a tier is faster than host memory."""
    return device not in (HOST, DISK)


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
        Budgets in bytes: accelerators by number, then ``mps``, ``cpu``, and ``disk`` if given.

    Raises:
        ConfigError: Keys that are no devices, and budgets that are no sizes, all of them together.
    """
    machine = inspect_machine() if inventory is None else inventory
    if max_memory is None:
        free = sorted(_accelerator_memory(machine), key=lambda pair: _tier_order(pair[0]))
        if all(isinstance(device, int) for device, _ in free):
            free.append((HOST, machine.host_available_bytes))
        return dict(free)
    mistakes = [
        f"max_memory has a budget for {device!r}, which is no device: nothing could be put there. "
        "Name accelerators by their numbers (0, 1, ...), and the others 'mps', 'cpu' and 'disk'."
        for device in max_memory
        if device not in NAMED_TIERS and not (type(device) is int and device >= 0)
    ]
    budgets: dict[DeviceKey, int] = {}
    for device in sorted(max_memory, key=_tier_order):
        budget: Any = max_memory[device]
        try:
            # What is computed from a number of bytes is a float as often as not, be it infinite.
            is_float = isinstance(budget, float) and budget >= 0
            budgets[device] = int(min(budget, sys.maxsize)) if is_float else parse_bytes(budget)
        except ConfigError as error:
            mistakes.append(f"max_memory[{device!r}]: {error}")
    if mistakes:
        raise ConfigError(*mistakes)
    present = [device for device, _ in _accelerator_memory(machine)]
    absent = [device for device in budgets if is_accelerator(device) and device not in present]
    if absent:
        text = "max_memory names devices that are not available: %s; this machine has %s. A map "
        text += "that uses them can be made here, and followed only where they are."
        _log.warning(text, absent, present or "no accelerator")
    return budgets


def _tier_order(device: Any) -> tuple[int, int]:
    return (0, device) if isinstance(device, int) else (1, [*NAMED_TIERS, device].index(device))


def _accelerator_memory(machine: Inventory) -> Iterator[tuple[DeviceKey, int]]:
    for unit in registry.usable_units(machine):
        if unit.kind in NAMED_TIERS:
            # Its memory is the host's, and its driver counts nothing of its own.
            yield unit.kind, unit.free_bytes or machine.host_available_bytes
        else:
            if not unit.free_bytes and not unit.total_bytes:
                text = "Nothing is put on accelerator %s (%s): its driver tells no free memory. "
                text += "Give max_memory={%s: ...} to use it."
                _log.warning(text, unit.index, unit.name, unit.index)
            yield unit.index, unit.free_bytes


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
        max_memory: As in :func:`get_max_memory`; no budget grows, and one of 0 takes no share.
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
    # Room for the block that a share's end would cut, as large as a whole one or a mean layer.
    whole_classes = class_names(no_split_module_classes)
    block_bytes: dict[str, int] = {}
    for module_name, module in model.named_modules():
        class_name = type(module).__name__
        if module_name and module_name in module_sizes and class_name in whole_classes:
            # The first of its class stands for all: the last share takes what is larger.
            block_bytes.setdefault(class_name, module_sizes[module_name])
    tensor_names = frozenset(get_module_leaves(module_sizes))
    sizes_of_modules = {n: size for n, size in module_sizes.items() if n not in tensor_names}
    layer_bytes = [sizes_of_modules[name] for name in get_module_leaves(sizes_of_modules)]
    mean_bytes = int(sum(layer_bytes) / max(1, len(layer_bytes)))
    extra_bytes = int(_ROOM_PER_BLOCK * max([mean_bytes, *block_bytes.values()]))
    share_bytes = int(module_sizes[""] // num_shares) + extra_bytes
    first_device, *other_devices = sharing
    for device in sharing[low_zero:-1]:
        budgets[device] = min(share_bytes, budgets[device])
    if low_zero:
        rest_bytes = module_sizes[""] - sum(budgets[device] for device in other_devices)
        budgets[first_device] = min(max(0, math.ceil(rest_bytes)), budgets[first_device])
    return budgets


DeviceOfMap = int | str | torch.device


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, int | float | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: WeightFormat | None = None,
    special_dtypes: Mapping[str, WeightFormat] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    inventory: Inventory | None = None,
) -> OrderedDict[str, DeviceKey]:
    """Decide where each block of a model goes: accelerators first, then host memory, then the disk.

    Devices are filled in order with blocks in order, so that a forward pass goes from each device
    to the next once. A block that does not fit is split into its parts, as far as it may be. Where
    something is left to the host or the disk, the first accelerator in use keeps room for the
    largest layer that is brought back to it, and the host for the largest on the disk. Tied weights
    share one device. The same input gives the same map.

    No map leaves more to the disk than Accelerate's. Where that can only be had without room for
    the largest layer on the first accelerator in use, a warning says how much it lacks. Where both
    have that room, no map leaves more to the host either.

    Args:
        model: The module; its tensors may be on ``meta``.
        max_memory: Budgets by device, as in :func:`get_max_memory`; the disk's may be left out.
        no_split_module_classes: Names of classes that must not be split, such as residual blocks.
        dtype: The format in which weights will be loaded, as in :func:`compute_module_sizes`.
        special_dtypes: Formats of single tensors, as in :func:`compute_module_sizes`.
        verbose: Whether it is logged, at level INFO, where each block is put.
        clean_result: Whether modules whose parts all lie on one device are named as a whole.
        offload_buffers: Whether buffers of blocks on the host or the disk stay there, too; if not,
            they lie on an accelerator, and a warning says where that has no room for them.
        fallback_allocation: Whether a device that would stay empty takes a later block that fits.
        inventory: The machine; this one where it is None.

    Returns:
        Devices by the names of modules and tensors.

    Raises:
        ConfigError: The disk has a budget, and the model does not fit. A table says what each
            device holds and what it had no room for.
    """
    budgets = get_max_memory(max_memory, inventory=inventory)
    module_sizes = compute_module_sizes(model, dtype, special_dtypes)
    tied_groups = find_tied_parameters(model)
    if not tied_groups and check_tied_parameters_in_config(model):
        text = "The configuration of %s ties weights, and none of its weights are tied: each would "
        text += "get room of its own. Call model.tie_weights() before."
        _log.warning(text, type(model).__name__)
    whole_classes = class_names(no_split_module_classes)
    # Accelerate splits the model itself, also where its class must not be split.
    is_whole = type(model).__name__ in whole_classes
    parts = [("", model)] if is_whole else list(_direct_parts("", model))
    packing = block_packing.pack_blocks(
        block_packing.BlockForest(_list_blocks(parts, whole_classes, module_sizes), tied_groups),
        _tiers_of(budgets),
        may_skip_ahead=fallback_allocation,
    )
    for name, device in packing.devices.items() if verbose else ():
        _log.info("%s: put on %s, %s bytes", name, device, module_sizes.get(name, 0))
    if not packing.is_complete:
        raise ConfigError(_too_small_text(packing))
    _report_empty_devices(packing)
    if packing.lacking_room:
        _log.warning(
            "The first device in use has %s too little room for the largest layer that is brought "
            "back to it (%s): with it, it holds more than max_memory gives it.",
            *(format_bytes(round(it)) for it in (packing.lacking_room, packing.largest_kept_away)),
        )
    if not offload_buffers:
        buffer_sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        _check_room_for_buffers(packing, buffer_sizes)
    device_map = OrderedDict(packing.devices)
    return clean_device_map(device_map) if clean_result else device_map


def _direct_parts(module_name: str, module: nn.Module) -> Iterator[NamedPart]:
    """Parameters, submodules and buffers, those that stand there twice under both names."""
    # Accelerate leaves buffers out of all modules but the model itself, and second names of
    # submodules and parameters, too: its map has no device for them.
    parameters, buffers, submodules = module_tables(module)
    prefix = f"{module_name}." if module_name else ""
    for part_table in (parameters, submodules, buffers):
        for part_name, part in part_table.items():
            if part is not None:
                yield prefix + part_name, part


def _list_blocks(
    parts: Iterable[NamedPart], whole_classes: frozenset[str], sizes: Mapping[str, float]
) -> list[block_packing.Block]:
    """All blocks that may be placed alone, each before those inside of it."""
    blocks: list[block_packing.Block] = []
    stack: list[tuple[str, Any, str | None]] = [(*pair, None) for pair in reversed([*parts])]
    while stack:
        part_name, part, outer_name = stack.pop()
        # Tensors, layers and what must stay whole are not split.
        is_split = (
            isinstance(part, nn.Module)
            and type(part).__name__ not in whole_classes
            and next(part.children(), None) is not None
        )
        inner_parts = list(_direct_parts(part_name, part)) if is_split else []
        # Buffers that stand alone are not brought back and forth.
        is_layer = not inner_parts and isinstance(part, (nn.Module, nn.Parameter))
        blocks.append(block_packing.Block(part_name, sizes.get(part_name, 0), outer_name, is_layer))
        stack += [(name, inner_part, part_name) for name, inner_part in reversed(inner_parts)]
    return blocks


def _tiers_of(budgets: Mapping[DeviceKey, int]) -> list[block_packing.Tier]:
    accelerators = [device for device in budgets if is_accelerator(device)]
    # An accelerator without a number shares the host's memory: what lies on the disk goes to it.
    host_keeps_room = all(isinstance(device, int) for device in accelerators)
    main_device = accelerators[-1 if not host_keeps_room else 0] if accelerators else None
    tiers = [
        block_packing.Tier(device, budgets[device], level=0, keeps_room=device == main_device)
        for device in accelerators
    ]
    if HOST in budgets:
        tiers.append(block_packing.Tier(HOST, budgets[HOST], level=1, keeps_room=host_keeps_room))
    return [*tiers, block_packing.Tier(DISK, budgets.get(DISK), level=2)]


def _too_small_text(packing: block_packing.Packing) -> str:
    table_rows = [("device", "budget", "placed", "wanted next", "its size")]
    for tier in packing.tiers:
        refusal = packing.refusals.get(tier.device)
        wanted = (refusal.block, format_bytes(round(refusal.size))) if refusal else ("", "")
        limit = "unlimited" if tier.budget is None else format_bytes(tier.budget)
        held = format_bytes(round(packing.held[tier.device]))
        table_rows.append((str(tier.device), limit, held, *wanted))
    last_refusal = packing.refusals[packing.tiers[-1].device]
    return "\n".join(
        [
            f"The model does not fit into max_memory: {last_refusal.block!r} and what comes after "
            "it have no place on any device.",
            *(f"  {line}" for line in table_lines(table_rows)),
            "What is wanted next counts with what is tied to it; the first accelerator and the cpu "
            "also keep room for the largest layer of a slower device. Give larger budgets, leave "
            "'disk' out (it is unlimited then), or let more classes be split.",
        ]
    )


def _report_empty_devices(packing: block_packing.Packing) -> None:
    refusals = packing.refusals.items()
    needs = {device: it.size + it.room_kept for device, it in refusals if not packing.held[device]}
    if needs:
        _log.info(
            "Nothing was put on %s, because of insufficient memory for the block whose turn it "
            "was. Bytes that would have been enough for it: %s",
            ", ".join(str(device) for device in needs),
            needs,
        )


def _check_room_for_buffers(packing: block_packing.Packing, sizes: Mapping[str, float]) -> None:
    away = [name for name, device in packing.devices.items() if not is_accelerator(device)]
    buffer_bytes = sum(sizes.get(name, 0) for name in away)
    spare_bytes = [
        tier.budget - packing.held[tier.device] - packing.largest_kept_away * tier.keeps_room
        for tier in packing.tiers
        if is_accelerator(tier.device) and tier.budget is not None
    ]
    if buffer_bytes and spare_bytes and max(spare_bytes) < buffer_bytes:
        warnings.warn(
            f"Buffers of layers on the cpu or the disk take {format_bytes(round(buffer_bytes))} of "
            f"an accelerator, and the most that is left on one is "
            f"{format_bytes(round(max(spare_bytes)))}: it may run out of memory. Give "
            "offload_buffers=True to keep them with their layers.",
            UserWarning,
            stacklevel=3,
        )


def clean_device_map(
    device_map: MutableMapping[str, Any], module_name: str = ""
) -> OrderedDict[str, Any]:
    """Name a module as a whole where several names of a map lie inside it, all on one device.

    Args:
        device_map: Devices by name; it is changed.
        module_name: The module whose names are put together; all of them where it is empty.

    Returns:
        The same map. Each module stands where the first name inside of it stood.
    """
    devices_below: dict[str, list[Any]] = {}
    names_below: dict[str, int] = {}
    for name, device in device_map.items():
        for outer_name in names_upwards(name):
            devices = devices_below.setdefault(outer_name, [])
            if device not in devices:
                devices.append(device)
            names_below[outer_name] = names_below.get(outer_name, 0) + (outer_name != name)
    cleaned_map: dict[str, Any] = {}
    for name, device in device_map.items():
        wholes = [
            outer_name
            for outer_name in names_upwards(name)
            if module_name in names_upwards(outer_name)
            and len(devices_below[outer_name]) == 1
            and names_below[outer_name] > 1
        ]
        cleaned_map[wholes[-1] if wholes else name] = device
    device_map.clear()
    device_map.update(cleaned_map)
    return device_map  # type: ignore[return-value]  # it is the caller's own mapping


def check_device_map(model: nn.Module, device_map: Mapping[str, DeviceOfMap]) -> None:
    """Refuse a map that has no device for some of a model's weights.

    Names that the model does not have are warned of.

    Args:
        model: The module.
        device_map: Devices by the names of modules and tensors.

    Raises:
        ConfigError: Parameters and saved buffers without a device, all of them.
    """
    tables = (model.named_modules, model.named_parameters, model.named_buffers)
    known_names = {name for table in tables for name, _ in table(remove_duplicate=False)}
    unknown_names = [name for name in device_map if name not in known_names]
    if unknown_names:
        warnings.warn(
            f"These device_map keys do not match any submodules or tensors of "
            f"{type(model).__name__}: {unknown_names}. They place nothing; check their spelling.",
            UserWarning,
            stacklevel=2,
        )
    tensor_names = model.state_dict(keep_vars=True)
    homeless_names = [name for name in tensor_names if owner_in(name, device_map) is None]
    if homeless_names:
        raise ConfigError(
            f"The device_map has no device for {len(homeless_names)} tensors of "
            f"{type(model).__name__}: {', '.join(homeless_names)}. They could not be loaded or "
            "computed with. Add them or the modules that hold them, or give '' for all others."
        )


def fallback_allocate(
    modules: Sequence[NamedPart],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: Iterable[Iterable[str]] | None = None,
) -> tuple[str | None, Any, list[NamedPart]]:
    """Find the first block that fits into a limit, and take it out of a list of modules.

    Args:
        modules: Modules and tensors with their names.
        module_sizes: Sizes by name, as of :func:`compute_module_sizes`.
        size_limit: Bytes, or a text such as ``"2GiB"``. Nothing fits below 0.
        no_split_module_classes: Names of the classes of blocks that must not be split.
        tied_parameters: Groups of tied parameters, whose blocks count together.

    Returns:
        The block's name, the block, and what is left of the modules: those around the block are
        split into their parts. None twice, and all modules, where nothing fits.

    Raises:
        ConfigError: The limit is no size.
    """
    whole_classes = class_names(no_split_module_classes)
    is_below_zero = not isinstance(size_limit, str) and size_limit < 0
    limit_bytes = -1 if is_below_zero else parse_bytes(size_limit)
    blocks = _list_blocks(modules, whole_classes, module_sizes)
    forest = block_packing.BlockForest(blocks, tied_parameters or ())
    members = block_packing.find_block(forest, forest.roots, lambda _, size: size <= limit_bytes)
    if not members:
        return None, None, list(modules)
    found_name = forest.blocks[members[0]].name
    remaining = list(modules)
    found_part = None
    for block_name in reversed([forest.blocks[n].name for n in forest.around(members[0])]):
        place = next(i for i, (name, _) in enumerate(remaining) if name == block_name)
        _, found_part = remaining[place]
        is_found = block_name == found_name
        remaining[place : place + 1] = [] if is_found else _direct_parts(block_name, found_part)
    return found_name, found_part, remaining


@dataclass(frozen=True, slots=True, repr=False)
class DeviceMapView:
    """Where the blocks of a model lie: it prints itself as bars and a table."""

    text: str

    def __repr__(self) -> str:
        return self.text


def show_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, int | float | str] | None = None,
    *,
    inventory: Inventory | None = None,
    device_map: Mapping[str, Any] | None = None,
) -> DeviceMapView:
    """Show where each block of a model lies, and what each device has left.

    Args:
        model: The module; its tensors may be on ``meta``.
        max_memory: Budgets, as in :func:`get_max_memory`. Where it is None, a device has what is
            free there now and what the model itself takes of it now; weights that hooks keep on
            the host are not seen as the model's.
        inventory: The machine; this one where it is None.
        device_map: Devices by names of modules and tensors; None: the model's ``hf_device_map``.

    Returns:
        What prints itself as bars and a table.

    Raises:
        ConfigError: There is no map, it names something else than devices, or lacks some weights.
    """
    shown_map = getattr(model, "hf_device_map", None) if device_map is None else device_map
    if not isinstance(shown_map, Mapping) or not shown_map:
        raise ConfigError(
            f"{type(model).__name__} has no device map to show: hf_device_map is {shown_map!r}. "
            "Make one with infer_auto_device_map(model), or by load_checkpoint_and_dispatch."
        )
    check_device_map(model, shown_map)
    machine = inspect_machine() if inventory is None else inventory
    capacities = get_max_memory(max_memory, inventory=machine)
    devices = {name: _device_key(device) for name, device in shown_map.items()}
    sizes = dict.fromkeys(devices, 0.0)
    module_sizes = compute_module_sizes(model)
    for tensor_name, tensor in named_module_tensors(model, recurse=True):
        # Buffers that are not saved may be without a device.
        owner = owner_in(tensor_name, devices)
        if owner is not None:
            sizes[owner] += module_sizes[tensor_name]
        # What the model takes now is not free, and its own; on `meta` it takes nothing.
        if max_memory is None and (place := _device_key(tensor.device)) in capacities:
            capacities[place] += tensor.numel() * tensor.itemsize
    labels: dict[DeviceKey, str] = {
        unit.index: f"{unit.index} · {unit.name}" for unit in registry.usable_units(machine)
    }
    runs = _fold_runs(devices, sizes, model)
    bars = [
        (labels.get(device, str(device)), *_bar(device, runs, capacities.get(device)))
        for device in sorted({*capacities, *devices.values()}, key=_tier_order)
    ]
    rows = [
        (label, labels.get(device, str(device)), format_bytes(round(size)))
        for label, device, size in runs
    ]
    num_devices = count_noun(len(set(devices.values())), "device")
    total = f"{format_bytes(round(sum(sizes.values())))}, {count_noun(len(devices), 'block')}"
    headline = f"{type(model).__name__}: {total} on {num_devices}"
    table = table_lines([("block", "device", "bytes"), *rows])
    return DeviceMapView("\n".join([headline, *table_lines(bars), "", *table]))


def _device_key(device: Any) -> DeviceKey:
    """An accelerator's number; the name of what there is one of."""
    if isinstance(device, int) or device == DISK:
        return device  # type: ignore[no-any-return]  # both are keys
    torch_device = as_device(device)
    named = (*NAMED_TIERS, "meta")
    return torch_device.type if torch_device.type in named else torch_device.index or 0


_Run = tuple[str, DeviceKey, float]
"""Blocks that follow one another on one device: ``model.layers.0-11``, the device, bytes."""


def _fold_runs(
    devices: Mapping[str, DeviceKey], sizes: Mapping[str, float], model: nn.Module
) -> list[_Run]:
    """The blocks of a map in the model's order; those whose numbers count on are put together."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    places = {name: place for place, name in enumerate(names)}

    def place_of(name: str) -> tuple[int, bool]:
        # A tensor stands between its module and the modules inside of that.
        known = next(outer for outer in names_upwards(name) if outer in places)
        return places[known], known != name

    def run_key(place_and_name: tuple[int, str]) -> tuple[Any, ...]:
        place, name = place_and_name
        found = _NUMBER_AT_END.fullmatch(name)
        # Equal for as long as the number counts with the place.
        return (found[1], int(found[2]) - place, devices[name]) if found else (name,)

    runs = []
    for _, group in itertools.groupby(enumerate(sorted(devices, key=place_of)), key=run_key):
        first, *others = [name for _, name in group]
        end = f"-{others[-1][len(others[-1].rstrip('0123456789')) :]}" if others else ""
        size = sum(sizes[name] for name in (first, *others))
        runs.append((f"{first or '(the whole model)'}{end}", devices[first], size))
    return runs


def _bar(device: DeviceKey, runs: list[_Run], capacity: int | None) -> tuple[str, str, str]:
    used = sum(size for _, place, size in runs if place == device)
    rest = "no limit known"
    if capacity is not None:
        left = round(capacity - used)
        rest = f"{format_bytes(left)} left" if left >= 0 else f"✗ {format_bytes(-left)} too much"
    # Without a capacity, and beyond it, the bar is scaled to what lies there.
    scale = _BAR_CHARS / max(capacity or 0, used, 1)
    text = ""
    before = 0.0
    for number, (_, place, size) in enumerate(runs):
        if place == device:
            before += size
            # Ends are rounded, not lengths: many short runs are together as long as they should be.
            text += "█▓"[number % 2] * (round(scale * before) - len(text))
    of_capacity = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"[{text:·<{_BAR_CHARS}}]", f"holds {format_bytes(round(used))}{of_capacity}", rest
