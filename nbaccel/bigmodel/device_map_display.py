"""A device map as bars and a table: what lies where, and what is left there.

It shows a map that was made or is in use; it makes none, and checks none against budgets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.bigmodel.device_map import (
    DISK,
    HOST,
    NAMED_TIERS,
    DeviceKey,
    check_device_map,
    get_max_memory,
    is_accelerator,
)
from nbaccel.bigmodel.module_sizes import compute_module_sizes, named_module_tensors, names_upwards
from nbaccel.memory.estimate import table_lines
from nbaccel.output.panel.live_html import html_table
from nbaccel.plan import registry
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Inventory

_BAR_CHARS = 40
_FREE_CHAR = "·"
_RUN_CHARS = "█▓"
_NUMBER_AT_END = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRun:
    """Blocks that follow one another and lie on one device."""

    label: str  # their name: ``model.embed``, or ``model.layers.0-11`` for numbered ones
    device: DeviceKey  # where they lie
    size: int  # bytes of them all; what is tied counts where its first name is
    num_blocks: int  # how many names of the map they are


@dataclass(frozen=True, kw_only=True, slots=True)
class TierBar:
    """One device, with what lies on it."""

    device: DeviceKey  # its number or name
    label: str  # what it is called
    capacity: int | None  # bytes that the model may take there; None where that is not known
    runs: tuple[BlockRun, ...]  # what lies there, in the model's order

    @property
    def used(self) -> int:
        """Bytes that lie there."""
        return sum(block_run.size for block_run in self.runs)

    @property
    def left(self) -> int | None:
        """Bytes that are left, negative where it holds too much; None where that is not known."""
        return None if self.capacity is None else self.capacity - self.used

    def cells(self, runs: Sequence[BlockRun]) -> tuple[str, ...]:
        """Its row: what it is called, a bar, what it holds, and what is left."""
        of_capacity = "" if self.capacity is None else f" of {format_bytes(self.capacity)}"
        holds = f"holds {format_bytes(self.used)}{of_capacity}"
        rest = "no limit known" if self.left is None else f"{format_bytes(self.left)} left"
        if self.left is not None and self.left < 0:
            rest = f"✗ {format_bytes(-self.left)} too much"
        # Without a capacity, and beyond it, the bar is scaled to what lies there.
        size = max(self.capacity or 0, self.used, 1)
        text = ""
        size_before = 0
        for block_run in self.runs:
            size_before += block_run.size
            # Ends are rounded, not lengths: the sum of many short runs is as long as it should be.
            run_end = round(_BAR_CHARS * size_before / size)
            text += _RUN_CHARS[runs.index(block_run) % len(_RUN_CHARS)] * (run_end - len(text))
        return self.label, f"[{text:{_FREE_CHAR}<{_BAR_CHARS}}]", holds, rest


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DeviceMapView:
    """Where the blocks of a model lie; it shows itself in terminals and notebooks."""

    model_name: str  # the model's class
    bars: tuple[TierBar, ...]  # the devices, the fastest first
    runs: tuple[BlockRun, ...]  # all blocks in the model's order

    def _table_rows(self) -> list[tuple[str, ...]]:
        """The table: a head, and a line for each run of blocks."""
        names = {bar.device: bar.label for bar in self.bars}
        return [
            ("block", "device", "bytes"),
            *((run.label, names[run.device], format_bytes(run.size)) for run in self.runs),
        ]

    def __repr__(self) -> str:
        bars = [bar.cells(self.runs) for bar in self.bars]
        tables = (*table_lines(bars), "", *table_lines(self._table_rows()))
        return "\n".join([self._headline(), *tables])

    def _headline(self) -> str:
        total_size = sum(block_run.size for block_run in self.runs)
        blocks = count_noun(sum(block_run.num_blocks for block_run in self.runs), "block")
        devices = count_noun(len({block_run.device for block_run in self.runs}), "device")
        return f"{self.model_name}: {format_bytes(total_size)}, {blocks} on {devices}"

    def _repr_html_(self) -> str:
        rows = [tuple(map(escape, bar.cells(self.runs))) for bar in self.bars]
        bars = [(name, f"<code>{bar}</code>", *texts) for name, bar, *texts in rows]
        # With `tabindex` the keyboard can scroll the table.
        return (
            f'<div role="heading" aria-level="3"><b>{escape(self._headline())}</b></div>'
            f"{html_table([('device', '', '', ''), *bars], is_html=True)}"
            '<div style="max-height:340px;overflow:auto" tabindex="0">'
            f"{html_table(self._table_rows())}</div>"
        )


# ------------------------------------------------------------------------------- what is shown
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
        device_map: Devices by the names of modules and tensors; the model's own ``hf_device_map``
            where it is None.

    Returns:
        What prints itself as bars and a table, and shows itself so in notebooks.

    Raises:
        ConfigError: There is no map, it names something that is no device, or it has no device for
            some weights.
    """
    shown_map = getattr(model, "hf_device_map", None) if device_map is None else device_map
    if not isinstance(shown_map, Mapping) or not shown_map:
        raise ConfigError(
            f"{type(model).__name__} has no device map to show: hf_device_map is {shown_map!r}. "
            "Make one with infer_auto_device_map(model) and give it as device_map, or load the "
            'model with load_checkpoint_and_dispatch(..., device_map="auto").'
        )
    check_device_map(model, shown_map)
    devices = {name: _device_key(device) for name, device in shown_map.items()}
    runs = tuple(_fold_runs(_blocks_in_order(model, devices)))
    machine = inspect_machine() if inventory is None else inventory
    capacities: dict[DeviceKey, int] = get_max_memory(max_memory, inventory=machine)
    if max_memory is None:  # what the model takes now is not free, and its own; on `meta`, nothing
        for _, tensor in named_module_tensors(model, recurse=True):
            if not tensor.is_meta and (device := _key_of(tensor.device)) in capacities:
                capacities[device] += tensor.numel() * tensor.itemsize
    names = {unit.index: f"{unit.index} · {unit.name}" for unit in registry.usable_units(machine)}
    bars = tuple(
        TierBar(
            device=device,
            label=names.get(device, str(device)) if isinstance(device, int) else device,
            capacity=capacities.get(device),
            runs=tuple(block_run for block_run in runs if block_run.device == device),
        )
        for device in sorted({*capacities, *(run.device for run in runs)}, key=_speed_order)
    )
    return DeviceMapView(model_name=type(model).__name__, bars=bars, runs=runs)


def _device_key(device: Any) -> DeviceKey:
    if isinstance(device, int) or device == DISK:
        return device  # type: ignore[no-any-return]  # both are keys
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"The device map has {device!r}, which is no device, so it cannot be shown where that "
            "is. Give a number, 'cpu', 'disk' or a torch.device."
        ) from error
    return _key_of(torch_device)


def _key_of(device: torch.device) -> DeviceKey:
    """An accelerator's number; the name of what there is one of."""
    return device.type if device.type in (*NAMED_TIERS, "meta") else device.index or 0


def _blocks_in_order(model: nn.Module, devices: Mapping[str, DeviceKey]) -> Iterator[BlockRun]:
    """The names of the map in the model's order, each with its own bytes."""
    sizes = dict.fromkeys(devices, 0.0)
    module_sizes = compute_module_sizes(model)
    for tensor_name, _ in named_module_tensors(model, recurse=True):
        owner = next((name for name in names_upwards(tensor_name) if name in devices), None)
        # Buffers that are not saved may be without a device.
        if owner is not None:
            sizes[owner] += module_sizes[tensor_name]
    places = {
        name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))
    }

    def place_of(name: str) -> tuple[int, bool]:
        # A tensor stands between its module and the modules inside of that.
        known = next(outer for outer in names_upwards(name) if outer in places)
        return places[known], known != name

    for name in sorted(devices, key=place_of):
        yield BlockRun(label=name, device=devices[name], size=round(sizes[name]), num_blocks=1)


def _fold_runs(blocks: Iterable[BlockRun]) -> Iterator[BlockRun]:
    """Put blocks together whose names differ in a number that counts on."""

    def run_key(place_and_block: tuple[int, BlockRun]) -> tuple[Any, ...]:
        place, block = place_and_block
        found = _NUMBER_AT_END.fullmatch(block.label)
        # Equal for as long as the number counts with the place.
        return (found[1], int(found[2]) - place, block.device) if found else (block.label,)

    for _, group in itertools.groupby(enumerate(blocks), key=run_key):
        run = [block for _, block in group]
        label = run[0].label or "(the whole model)"
        if len(run) > 1:
            last = run[-1].label
            label += f"-{last[len(last.rstrip('0123456789')) :]}"
        yield BlockRun(
            label=label,
            device=run[0].device,
            size=sum(block.size for block in run),
            num_blocks=len(run),
        )


def _speed_order(device: DeviceKey) -> tuple[int, int, str]:
    slowness = 0 if is_accelerator(device) else [HOST, DISK].index(str(device)) + 1
    return (slowness, device, "") if isinstance(device, int) else (slowness, 0, device)
