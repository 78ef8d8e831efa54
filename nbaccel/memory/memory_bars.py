"""The memory of a run by place, as bars against what the machine has."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbaccel.base.atomic import nearest_folder
from nbaccel.base.units import format_bytes
from nbaccel.memory.estimate import Bytes, MemoryEstimate
from nbaccel.plan import Inventory, registry

SEGMENT_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "moment")
"""The contents of memory, in the order of the bars; ``moment`` is freed within the step."""

SEGMENT_NAMES = {"others": "in use by others", "buckets": "buffers", "moment": "temporary"}
"""Names of kinds that the word itself does not explain."""

_HOST = "host memory"


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

    label: str
    """``cuda:0 · NVIDIA H100``, ``host memory``"""
    capacity: int
    """0 where it is unknown."""
    segments: tuple[BarSegment, ...]
    """In order; ``free`` comes last."""
    needed: int
    lacking: int
    """What is needed and not free."""

    @property
    def place(self) -> str:
        """The place without its product: ``cuda:0``."""
        return self.label.partition(" · ")[0]

    @property
    def is_host(self) -> bool:
        """Whether it is the machine's own memory."""
        return self.place == _HOST

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
    label = _HOST
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
