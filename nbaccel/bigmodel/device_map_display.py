"""A device map as bars and a table: what lies where, and what is left there.

It shows a map that was made or is in use; it makes none, and checks none against budgets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, first_few, format_bytes
from nbaccel.bigmodel.device_map import check_device_map
from nbaccel.bigmodel.memory_budgets import (
    DISK,
    HOST,
    NAMED_TIERS,
    DeviceKey,
    get_max_memory,
    is_accelerator,
)
from nbaccel.bigmodel.module_sizes import compute_module_sizes, names_upwards
from nbaccel.bigmodel.module_tensors import named_module_tensors
from nbaccel.plan import registry
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Inventory

_BAR_CHARS = 40
_FREE_CHAR = "·"
_RUN_CHARS = "█▓"
_NUMBER_AT_END = re.compile(r"(.*?)(\d+)")

# Colours that the colour-blind can tell apart (Okabe and Ito), with patterns for print.
_RUN_COLOURS = (
    "#0072b2",
    "repeating-linear-gradient(45deg, #e69f00 0 5px, #c98a00 5px 8px)",
    "repeating-linear-gradient(90deg, #009e73 0 6px, #008560 6px 8px)",
    "repeating-linear-gradient(135deg, #cc79a7 0 3px, #b25f8d 3px 6px)",
    "repeating-linear-gradient(0deg, #56b4e9 0 4px, #3d9fd6 4px 6px)",
    "repeating-linear-gradient(45deg, #f0e442 0 2px, #d0c420 2px 4px)",
)

# Variables of JupyterLab and VS Code where there are any: both themes stay readable.
_STYLE = """
.nbaccel-map {
  --nb-ink: var(--jp-ui-font-color1, var(--vscode-foreground, currentColor));
  --nb-line: var(--jp-border-color2, rgba(128, 128, 128, 0.4));
  --nb-shade: var(--jp-layout-color2, rgba(128, 128, 128, 0.12));
  --nb-bad: var(--jp-error-color1, #d32f2f);
  color: var(--nb-ink); max-width: 900px;
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.4;
  font-family: var(--jp-ui-font-family, system-ui, sans-serif);
}
.nbaccel-map .nbaccel-heading { font-weight: 600; font-size: 14px; padding-bottom: 4px; }
.nbaccel-map .nbaccel-bar { margin: 0 0 8px; }
.nbaccel-map .nbaccel-bar-head {
  display: flex; justify-content: space-between; gap: 0 10px; flex-wrap: wrap;
}
.nbaccel-map .nbaccel-bar-label { font-weight: 600; }
.nbaccel-map .nbaccel-track {
  position: relative; display: flex; height: 20px; border: 1px solid var(--nb-line);
  border-radius: 3px; overflow: hidden; background: var(--nb-shade); margin: 2px 0;
}
.nbaccel-map .nbaccel-lacks .nbaccel-track { border: 2px solid var(--nb-bad); }
.nbaccel-map .nbaccel-lacks .nbaccel-word { color: var(--nb-bad); font-weight: 600; }
.nbaccel-map .nbaccel-segment {
  height: 100%; flex: none; min-width: 2px; box-sizing: border-box;
  border-right: 1px solid var(--jp-layout-color1, rgba(128, 128, 128, 0.6));
}
.nbaccel-map .nbaccel-capacity {
  position: absolute; top: 0; bottom: 0; width: 0; border-left: 3px solid var(--nb-ink);
}
.nbaccel-map .nbaccel-swatch {
  display: inline-block; width: 11px; height: 11px; border: 1px solid var(--nb-line);
  vertical-align: -1px; margin-right: 6px;
}
.nbaccel-map .nbaccel-scroll { max-height: 340px; overflow: auto; }
.nbaccel-map table { border-collapse: collapse; font-size: 12px; width: 100%; margin: 4px 0; }
.nbaccel-map th, .nbaccel-map td {
  text-align: left !important; vertical-align: top; padding: 2px 10px 2px 0;
  background: transparent;
  border-bottom: 1px solid var(--nb-line); overflow-wrap: anywhere; color: inherit;
}
.nbaccel-map td.nbaccel-size, .nbaccel-map th.nbaccel-size {
  text-align: right !important; white-space: nowrap;
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRun:
    """Blocks that follow one another and lie on one device.

    Attributes:
        label: Their name: ``model.embed``, or ``model.layers.0-11`` for numbered ones.
        device: Where they lie.
        size: Bytes of them all; what is tied counts where its first name is.
        num_blocks: How many names of the map they are.
    """

    label: str
    device: DeviceKey
    size: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TierBar:
    """One device, with what lies on it.

    Attributes:
        device: Its number or name.
        label: What it is called.
        capacity: Bytes that the model may take there; None where that is not known.
        runs: What lies there, in the model's order.
    """

    device: DeviceKey
    label: str
    capacity: int | None
    runs: tuple[BlockRun, ...]

    @property
    def used(self) -> int:
        """Bytes that lie there."""
        return sum(block_run.size for block_run in self.runs)

    @property
    def left(self) -> int | None:
        """Bytes that are left, negative where it holds too much; None where that is not known."""
        return None if self.capacity is None else self.capacity - self.used

    def holdings_text(self) -> str:
        """What it holds, of how much."""
        of_capacity = "" if self.capacity is None else f" of {format_bytes(self.capacity)}"
        return f"holds {format_bytes(self.used)}{of_capacity}"

    def rest_text(self) -> str:
        """What is left, or too much."""
        if self.left is None:
            return "no limit known"
        if self.left < 0:
            return f"{format_bytes(-self.left)} too much"
        return f"{format_bytes(self.left)} left"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DeviceMapView:
    """Where the blocks of a model lie; it shows itself in terminals and notebooks.

    Attributes:
        model_name: The model's class.
        bars: The devices, the fastest first.
        runs: All blocks in the model's order.
    """

    model_name: str
    bars: tuple[TierBar, ...]
    runs: tuple[BlockRun, ...]

    def table_rows(self) -> list[tuple[str, ...]]:
        """The table: a head, and a line for each run of blocks."""
        names = {bar.device: bar.label for bar in self.bars}
        return [
            ("block", "device", "bytes"),
            *(
                (block_run.label, names[block_run.device], format_bytes(block_run.size))
                for block_run in self.runs
            ),
        ]

    def __str__(self) -> str:
        label_chars = max((len(bar.label) for bar in self.bars), default=0)
        holdings_chars = max((len(bar.holdings_text()) for bar in self.bars), default=0)
        bar_lines = [
            f"{bar.label:<{label_chars}}  {_bar_text(bar, self.runs)}  "
            f"{bar.holdings_text():<{holdings_chars}}  {bar.rest_text()}"
            for bar in self.bars
        ]
        table = self.table_rows()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table_lines = [
            f"{label:<{widths[0]}}  {device:<{widths[1]}}  {size:>{widths[2]}}"
            for label, device, size in table
        ]
        return "\n".join([self._headline(), *bar_lines, "", *table_lines])

    def __repr__(self) -> str:
        return str(self)

    def _headline(self) -> str:
        total_size = sum(block_run.size for block_run in self.runs)
        num_blocks = sum(block_run.num_blocks for block_run in self.runs)
        devices = count_noun(len({block_run.device for block_run in self.runs}), "device")
        text = count_noun(num_blocks, "block")
        return f"{self.model_name}: {format_bytes(total_size)}, {text} on {devices}"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        bars_html = "".join(_bar_html(bar, self.runs) for bar in self.bars)
        head_row, *body_rows = self.table_rows()
        head_html = "".join(
            f'<th scope="col"{_size_class(column)}>{escape(text)}</th>'
            for column, text in enumerate(head_row)
        )
        body_html = "".join(
            _row_html(number, table_row) for number, table_row in enumerate(body_rows)
        )
        # With `tabindex` the keyboard can scroll the table.
        return (
            f'<style>{_STYLE}</style><div class="nbaccel-map">'
            f'<div class="nbaccel-heading" role="heading" aria-level="3">'
            f"{escape(self._headline())}</div>{bars_html}"
            f'<div class="nbaccel-scroll" tabindex="0"><table><thead><tr>{head_html}</tr></thead>'
            f"<tbody>{body_html}</tbody></table></div></div>"
        )


# ------------------------------------------------------------------------------- as text
def _bar_text(bar: TierBar, runs: Sequence[BlockRun]) -> str:
    # Without a capacity, and beyond it, the bar is scaled to what lies there.
    size = max(bar.capacity or 0, bar.used, 1)
    text = ""
    size_before = 0
    for block_run in bar.runs:
        size_before += block_run.size
        # Ends are rounded, not lengths: the sum of many short runs is as long as it should be.
        run_end = round(_BAR_CHARS * size_before / size)
        text += _RUN_CHARS[runs.index(block_run) % len(_RUN_CHARS)] * (run_end - len(text))
    return f"[{text:{_FREE_CHAR}<{_BAR_CHARS}}]"


# ------------------------------------------------------------------------------- as HTML
def _bar_html(bar: TierBar, runs: Sequence[BlockRun]) -> str:
    bar_size = max(bar.capacity or 0, bar.used, 1)
    inside_html = "".join(
        f'<span class="nbaccel-segment" title="{escape(block_run.label)}: '
        f'{escape(format_bytes(block_run.size))}" style="width:'
        f'{100 * block_run.size / bar_size:.3f}%; background:{_colour(runs.index(block_run))}">'
        "</span>"
        for block_run in bar.runs
        if block_run.size
    )
    is_over = bar.left is not None and bar.left < 0
    rest_html = escape(bar.rest_text())
    if is_over:
        place = 100 * (bar.capacity or 0) / bar_size
        inside_html += f'<span class="nbaccel-capacity" style="left:{place:.2f}%"></span>'
        rest_html = f'<span class="nbaccel-word">✗ {rest_html}</span>'
    return (
        f'<div class="nbaccel-bar{" nbaccel-lacks" if is_over else ""}">'
        f'<div class="nbaccel-bar-head"><span class="nbaccel-bar-label">{escape(bar.label)}</span>'
        f"<span>{escape(bar.holdings_text())} · {rest_html}</span></div>"
        f'<div class="nbaccel-track" role="img" aria-label="{escape(_bar_words(bar))}">'
        f"{inside_html}</div></div>"
    )


def _bar_words(bar: TierBar) -> str:
    """A bar in words, for who cannot see it."""
    texts = [f"{block_run.label} {format_bytes(block_run.size)}" for block_run in bar.runs]
    contents = first_few(texts, 12) or "nothing"
    return f"{bar.label}: {bar.holdings_text()} ({contents}), {bar.rest_text()}"


def _row_html(number: int, row: Sequence[str]) -> str:
    label, *others = map(escape, row)
    swatch_html = f'<span class="nbaccel-swatch" style="background:{_colour(number)}"></span>'
    cells_html = "".join(
        f"<td{_size_class(column)}>{text}</td>" for column, text in enumerate(others, start=1)
    )
    return f'<tr><th scope="row">{swatch_html}{label}</th>{cells_html}</tr>'


def _size_class(column: int) -> str:
    return ' class="nbaccel-size"' if column == 2 else ""


def _colour(number: int) -> str:
    return _RUN_COLOURS[number % len(_RUN_COLOURS)]


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
    if max_memory is None:
        for device, present_bytes in _present_bytes(model).items():
            if device in capacities:
                capacities[device] += present_bytes
    return DeviceMapView(
        model_name=type(model).__name__,
        bars=tuple(_bars_of(runs, capacities, machine)),
        runs=runs,
    )


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
    waiting: list[BlockRun] = []
    for block in blocks:
        if waiting and not _continues(waiting[-1], block):
            yield _folded(waiting)
            waiting = []
        waiting.append(block)
    if waiting:
        yield _folded(waiting)


def _continues(block: BlockRun, next_block: BlockRun) -> bool:
    stem, number = _stem_and_number(block.label)
    next_stem, next_number = _stem_and_number(next_block.label)
    follows = number is not None and next_number == number + 1
    return follows and stem == next_stem and block.device == next_block.device


def _stem_and_number(label: str) -> tuple[str, int | None]:
    number_match = _NUMBER_AT_END.fullmatch(label)
    return (label, None) if number_match is None else (number_match[1], int(number_match[2]))


def _folded(blocks: Sequence[BlockRun]) -> BlockRun:
    label = blocks[0].label or "(the whole model)"
    if len(blocks) > 1:
        label += f"-{_stem_and_number(blocks[-1].label)[1]}"
    return BlockRun(
        label=label,
        device=blocks[0].device,
        size=sum(block.size for block in blocks),
        num_blocks=len(blocks),
    )


def _present_bytes(model: nn.Module) -> dict[DeviceKey, int]:
    """Bytes that the model takes of each device now; what is on ``meta`` takes none."""
    present: dict[DeviceKey, int] = {}
    for _, tensor in named_module_tensors(model, recurse=True):
        if not tensor.is_meta:
            device = _key_of(tensor.device)
            present[device] = present.get(device, 0) + tensor.numel() * tensor.itemsize
    return present


def _bars_of(
    runs: Sequence[BlockRun], capacities: Mapping[DeviceKey, int], machine: Inventory
) -> Iterator[TierBar]:
    names = {unit.index: f"{unit.index} · {unit.name}" for unit in registry.usable_units(machine)}
    devices = dict.fromkeys(block_run.device for block_run in runs)
    for device in sorted({*capacities, *devices}, key=_speed_order):
        yield TierBar(
            device=device,
            label=names.get(device, str(device)) if isinstance(device, int) else device,
            capacity=capacities.get(device),
            runs=tuple(block_run for block_run in runs if block_run.device == device),
        )


def _speed_order(device: DeviceKey) -> tuple[int, int, str]:
    slowness = 0 if is_accelerator(device) else [HOST, DISK].index(str(device)) + 1
    return (slowness, device, "") if isinstance(device, int) else (slowness, 0, device)
