"""How large a model is, tied weights once; what a run needs, as bars beside what there is."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.atomic import nearest_folder
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, first_few, format_bytes
from nbaccel.plan import Inventory, registry

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that memory depends on, in numbers of parameters."""

    total: int
    largest_layer: int  # of the module that has most of its own, children not counted
    trainable: int
    sizes: tuple[int, ...] = ()  # elements of each parameter; empty where only the sums are known


def measure(model: nn.Module, *, trains: bool = True) -> Shape:
    """Count a model."""
    # By id, not by address: all tensors on `meta` have the address 0.
    parameters = {id(p): p for p in model.parameters()}.values()
    return Shape(
        total=_count(parameters),
        largest_layer=max(_count(module.parameters(recurse=False)) for module in model.modules()),
        trainable=_count(p for p in parameters if p.requires_grad) if trains else 0,
        sizes=tuple(_numel(p) for p in parameters),
    )


def refuse_unsized(model: Any) -> None:
    """Refuse a class in the place of a model, and a model whose weights have no shape yet."""
    if isinstance(model, type):
        raise ConfigError(
            f"model={model.__name__} is a class, no module. Give an object: {model.__name__}(...)."
        )
    unsized_names = [
        parameter_name
        for parameter_name, parameter in getattr(model, "named_parameters", dict)() or ()
        if hasattr(parameter, "materialize")  # of torch's lazy modules, with torch not imported
    ]
    if unsized_names:
        raise ConfigError(
            f"This {type(model).__name__} has weights without a shape "
            f"({first_few(unsized_names, 2)}). Call it once: model(sample_batch)."
        )


def shape_of(model_or_shape: Any) -> Shape:
    """Read what a user gives as a model's size."""
    if isinstance(model_or_shape, Shape):
        return model_or_shape
    # By its method: for plain numbers torch need not be imported.
    if callable(getattr(model_or_shape, "modules", None)):
        refuse_unsized(model_or_shape)
        return measure(model_or_shape)
    try:
        total, largest = (int(number) for number in model_or_shape)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A model's memory cannot be estimated from {model_or_shape!r}: its size is unknown. "
            "Give the module (it may be on meta), or (parameters, parameters of the largest layer)."
        ) from error
    if not 0 < largest <= total:
        raise ConfigError(
            f"A model of {total:_} parameters cannot have a largest layer of {largest:_}: the "
            "estimate would mean nothing. Give (parameters, parameters of the largest layer)."
        )
    return Shape(total=total, largest_layer=largest, trainable=total)


def _count(parameters: Iterable[Any]) -> int:
    return sum(_numel(p) for p in parameters)


def _numel(parameter: Any) -> int:
    # `ds_numel` is what ZeRO-3 writes on a parameter before it leaves a placeholder.
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Memory in one place, by what it holds."""

    parameters: int = 0  # the model as it computes
    gradients: int = 0  # what the backward pass leaves for the optimizer
    optimizer: int = 0  # its states and its own copy of the parameters
    buckets: int = 0  # room to communicate, to gather parameters and to read from disk
    activations: int = 0  # what the forward pass keeps for the backward pass, and what that adds
    in_backward: int = 0  # for a moment besides the activations: gradients in transfer, gathered
    in_step: int = 0  # for a moment when the optimizer begins: gradients made flat, or in fp32

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer: what ZeRO divides."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All that stays for longer than a moment."""
        return self.model_states + self.buckets + self.activations

    @property
    def peak(self) -> int:
        """The most at any moment: what must be free."""
        # Activations are freed before the optimizer steps, so the two never live together.
        moments = max(self.activations + self.in_backward, self.in_step)
        return self.model_states + self.buckets + moments

    def __mul__(self, times: int) -> Bytes:
        return Bytes(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    def __add__(self, other: Bytes) -> Bytes:
        names = (f.name for f in fields(self))
        return Bytes(**{name: getattr(self, name) + getattr(other, name) for name in names})


_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "total", "peak")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryEstimate:
    """What a run needs, and what this machine has."""

    device: Bytes  # on each device; where processes compute on the CPU this is host memory, too
    host: Bytes  # on each host, for all of its processes
    nvme: Bytes  # on each host's disk
    shape: Shape  # the model
    strategy: str  # how it is trained, in words: ``ZeRO-3, bf16, optimizer on cpu``
    num_processes: int  # processes on each host
    num_nodes: int  # hosts
    device_free: int | None  # free memory of the fullest GPU used; None where there is none
    host_free: int  # free memory of this host
    nvme_free: int | None = None  # free space in its folders; None where it names none
    nvme_folders: tuple[Path, ...] = ()  # the folders that it swaps to
    notes: tuple[str, ...] = ()  # notes about these numbers

    @property
    def host_needed(self) -> int:
        """All host memory, including that of devices where processes compute on the CPU."""
        # Without a GPU each process's "device" is host memory, so that adds to the host's.
        on_cpu = self.device * self.num_processes if self.device_free is None else Bytes()
        return self.host.peak + on_cpu.peak

    @property
    def lacking(self) -> dict[str, int]:
        """Bytes that this machine has too little of, by place: ``device``, ``host``, ``nvme``."""
        places = {
            "device": (self.device.peak, self.device_free),
            "host": (self.host_needed, self.host_free),
            "nvme": (self.nvme.total, self.nvme_free),
        }
        return {
            name: needed - free
            for name, (needed, free) in places.items()
            if free is not None and needed > free
        }

    @property
    def fits(self) -> bool:
        """Whether this machine has what it takes, as far as it is free now."""
        return not self.lacking

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a head, one line per kind of content, totals and what is free."""
        places = (self.device, self.host, self.nvme)
        lines: list[tuple[str, ...]] = [("", "per device", "per host", "NVMe per host")]
        lines += [(kind, *(_size(getattr(p, kind)) for p in places)) for kind in _KINDS]
        device_free = "(is host)" if self.device_free is None else format_bytes(self.device_free)
        nvme_free = "" if self.nvme_free is None else format_bytes(self.nvme_free)
        lines.append(("free now", device_free, format_bytes(self.host_free), nvme_free))
        return lines

    def __str__(self) -> str:
        return "\n".join([self._head(), *table_lines(self.rows()), self._verdict(), *self.notes])

    def __repr__(self) -> str:
        return f"<MemoryEstimate: {self._head()}: {self._verdict()}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        notes = paragraphs((self._verdict(), *self.notes))
        html = f"{paragraphs([self._head()])}{table_html(self.rows())}{notes}"
        return {"text/plain": str(self), "text/html": html}

    def _head(self) -> str:
        processes = count_noun(self.num_processes, "process")
        hosts = f"{count_noun(self.num_nodes, 'host')} of {processes}"
        return f"{self.shape.total:,} parameters, {self.strategy}, {hosts}"

    def _verdict(self) -> str:
        if self.fits:
            return "fits into what is free now"
        return f"does not fit: {self.lacking_text} too little"

    @property
    def lacking_text(self) -> str:
        """What is missing: ``3.3 GiB per device and 2.0 GiB of host memory``."""
        words = {"device": "per device", "host": "of host memory", "nvme": "of disk"}
        missing = (f"{format_bytes(size)} {words[name]}" for name, size in self.lacking.items())
        return " and ".join(missing)


def torch_estimate(
    shape: Shape,
    *,
    strategy: str,
    states: Bytes,
    num_processes: int,
    num_nodes: int,
    activation_bytes: int,
    inventory: Inventory,
    host: Bytes = Bytes(),
) -> MemoryEstimate:
    """Training with one of torch's own strategies: states on each device, and on each host."""
    units = (inventory.gpus or registry.usable_units(inventory))[:num_processes]
    # Each process needs as much, so the fullest device that they use decides.
    free_bytes = min((unit.free_bytes for unit in units), default=None)
    return MemoryEstimate(
        device=states + Bytes(activations=activation_bytes),
        host=host,
        nvme=Bytes(),
        shape=shape,
        strategy=strategy,
        num_processes=num_processes,
        num_nodes=num_nodes,
        device_free=free_bytes,
        host_free=inventory.host_available_bytes,
        notes=common_notes(activation_bytes, on_cpu=free_bytes is None),
    )


def common_notes(activation_bytes: int, *, on_cpu: bool) -> tuple[str, ...]:
    """What to know about the numbers of any strategy."""
    notes = []
    if on_cpu:
        notes.append(
            "On CPUs the system may count a third more while memory is plentiful: these are "
            "tensors, and glibc keeps freed ones. Where memory is short, they are returned."
        )
    if not activation_bytes:
        notes.append("Activations are not in it: they depend on the batch.")
    return tuple(notes)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table for a terminal: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def table_html(rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """The same for a cell; so many columns are to the left."""

    def row_of(tag: str, texts: Sequence[str]) -> str:
        cells = []
        for number, text in enumerate(texts):
            style = "left" if number < num_left else "right;white-space:nowrap"
            cells.append(f"<{tag} style='text-align:{style}'>{escape(text)}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    head, *body = rows
    lines = "".join(row_of("td", row) for row in body)
    return f"<table><thead>{row_of('th', head)}</thead><tbody>{lines}</tbody></table>"


def paragraphs(texts: Sequence[str]) -> str:
    """A paragraph of HTML for each text."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


SEGMENT_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "moment")
"""The contents of memory, in the order of the bars; ``moment`` is freed within the step."""

SEGMENT_NAMES = {"others": "in use by others", "buckets": "buffers", "moment": "temporary"}
"""Names of kinds that the word itself does not explain."""

HOST = "host memory"


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar: one of `SEGMENT_KINDS`, ``others`` (in use already) or ``free``."""

    kind: str
    bytes: int

    @property
    def text(self) -> str:
        """``buffers 1.0 GiB``."""
        return f"{SEGMENT_NAMES.get(self.kind, self.kind)} {format_bytes(self.bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """Memory in one place, in bytes."""

    label: str  # ``cuda:0 · NVIDIA H100``, ``host memory``
    capacity: int  # 0 where it is unknown
    segments: tuple[BarSegment, ...]  # in order; ``free`` comes last
    needed: int
    lacking: int  # what is needed and not free

    @property
    def place(self) -> str:
        """The place without its product: ``cuda:0``."""
        return self.label.partition(" · ")[0]

    @property
    def free(self) -> int:
        """Bytes that stay free."""
        return sum(segment.bytes for segment in self.segments if segment.kind == "free")

    @property
    def used(self) -> int:
        """Bytes that are taken, by others too."""
        return sum(segment.bytes for segment in self.segments if segment.kind != "free")

    def text(self) -> str:
        """The bar in words."""
        parts = ", ".join(one.text for one in self.segments if one.kind != "free") or "nothing"
        capacity = f" of {format_bytes(self.capacity)}" if self.capacity else ""
        rest = f"{format_bytes(self.free)} left free"
        if self.lacking:
            rest = f"{format_bytes(self.lacking)} too little"
        return f"{self.label}: needs {format_bytes(self.needed)}{capacity} ({parts}), {rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """What one choice of settings needs; as bars against the memory of the machine, too."""

    estimate: MemoryEstimate
    bars: tuple[MemoryBar, ...]

    @property
    def lacking(self) -> int:
        """Bytes that are missing, over all places."""
        return sum(bar.lacking for bar in self.bars)

    @property
    def spare(self) -> int:
        """Bytes that stay free where it is tightest; negative: the bytes that are missing."""
        if self.lacking:
            return -max(bar.lacking for bar in self.bars)
        return min((bar.free for bar in self.bars if bar.needed), default=0)

    @property
    def lacking_text(self) -> str:
        """What is missing in each place: ``3.3 GiB too little on cuda:0``."""
        lacking = [bar for bar in self.bars if bar.lacking]
        return _by_place(lacking, lambda bar: f"{format_bytes(bar.lacking)} too little")

    @property
    def shares_text(self) -> str:
        """What is taken of each place: ``3.3 GiB of 80.0 GiB on cuda:0``."""
        needed = [bar for bar in self.bars if bar.needed]
        return _by_place(
            needed, lambda bar: f"{format_bytes(bar.needed)} of {format_bytes(bar.capacity)}"
        )


def _by_place(bars: Sequence[MemoryBar], bar_text: Callable[[MemoryBar], str]) -> str:
    """A clause per place; neighbouring places with the same clause share one."""
    clauses = []
    for text, same_bars in itertools.groupby(bars, key=bar_text):
        names = [bar.place for bar in same_bars]
        places = names[0] if len(names) == 1 else f"each of {names[0]} to {names[-1]}"
        clauses.append(f"{text} on {places}")
    return ", ".join(clauses)


def bars_of(estimate: MemoryEstimate, machine: Inventory) -> tuple[MemoryBar, ...]:
    """An estimate as bars: one for each device, the host and the disk."""
    bars = []
    gpus = (machine.gpus or registry.usable_units(machine))[: estimate.num_processes]
    for number, gpu in enumerate(gpus):
        # More processes than cards share the cards in turn.
        sharing = len(range(number, estimate.num_processes, len(gpus)))
        label = f"{gpu.kind}:{gpu.index} · {gpu.name}"
        bars.append(_bar(label, estimate.device * sharing, gpu.total_bytes, gpu.free_bytes))
    host = estimate.host
    label = HOST
    # Processes then compute in host memory, so their needs add up there.
    if not gpus:
        host += estimate.device * estimate.num_processes
        if estimate.num_processes > 1:
            label += f" · {estimate.num_processes} processes"
    bars.append(_bar(label, host, machine.host_total_bytes, machine.host_available_bytes))
    if estimate.nvme.total:
        folder = next(iter(estimate.nvme_folders), Path())
        disk = shutil.disk_usage(nearest_folder(folder))
        free = disk.free if estimate.nvme_free is None else estimate.nvme_free
        bars.append(_bar(f"disk · {folder}", estimate.nvme, disk.total, free))
    return tuple(bars)


def _bar(label: str, needs: Bytes, capacity: int, free: int) -> MemoryBar:
    sizes = {"others": max(0, capacity - free)}
    sizes |= {kind: getattr(needs, kind) for kind in SEGMENT_KINDS[:-1]}
    sizes |= {"moment": needs.peak - needs.total, "free": max(0, free - needs.peak)}
    return MemoryBar(
        label=label,
        capacity=capacity,
        segments=tuple(BarSegment(kind, size) for kind, size in sizes.items() if size),
        needed=needs.peak,
        # A capacity of 0 is unknown, so nothing can be said to be lacking.
        lacking=max(0, needs.peak - free) if capacity else 0,
    )
