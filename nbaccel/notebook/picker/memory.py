"""What a picked run needs, place by place, as bars against what the machine has."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.deepspeed.decided import nearest_folder, nvme_folders
from nbaccel.deepspeed.estimate import Bytes, MemoryEstimate, estimate_memory
from nbaccel.deepspeed.shape import Shape, measure
from nbaccel.plan import Inventory, Plan
from nbaccel.units import format_bytes

__all__ = ["KINDS", "NAMES", "Bar", "Need", "Segment", "Yardstick", "bars_of", "told_together"]

KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "moment")
"""What memory holds, in the order in which bars show it; ``moment`` is what lives shortly."""

NAMES = {"others": "in use by others", "moment": "for a moment"}
"""How people call those that need more than their kind's name."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar.

    Attributes:
        kind: One of `KINDS`, ``others`` (in use already) or ``free``.
        bytes: Its size.
    """

    kind: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Memory in one place.

    Attributes:
        label: Which place: ``cuda:0 · NVIDIA H100``, ``host memory``.
        capacity: Bytes in all; 0 where nobody can tell.
        segments: What is in it, in order; ``free`` comes last.
        needed: Bytes that the run needs there.
        lacking: Bytes that it needs and that are not free.
    """

    label: str
    capacity: int
    segments: tuple[Segment, ...]
    needed: int
    lacking: int

    def told(self) -> str:
        """The bar in words."""
        parts = [
            f"{NAMES.get(part.kind, part.kind)} {format_bytes(part.bytes)}"
            for part in self.segments
            if part.bytes and part.kind != "free"
        ]
        free = sum(part.bytes for part in self.segments if part.kind == "free")
        end = f"{format_bytes(self.lacking)} too little" if self.lacking else ""
        end = end or f"{format_bytes(free)} left free"
        of = f" of {format_bytes(self.capacity)}" if self.capacity else ""
        what = ", ".join(parts) or "nothing"
        return f"{self.label}: needs {format_bytes(self.needed)}{of} ({what}), {end}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one choice of settings needs.

    Attributes:
        estimate: The numbers, as DeepSpeed's or plain data-parallel training needs them.
        bars: The same against what there is.
    """

    estimate: MemoryEstimate
    bars: tuple[Bar, ...]

    @property
    def lacking(self) -> int:
        """Bytes that are missing, over all places."""
        return sum(bar.lacking for bar in self.bars)


@dataclass(kw_only=True)
class Yardstick:
    """Measures choices against one model.

    Args:
        model: The module; it may be on ``meta``.
        sample_batch: What one process calls it with; None leaves activations out.
        inventory: The machine.
    """

    model: Any
    sample_batch: Any
    inventory: Inventory
    _activations: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    _shape: Shape | None = None
    _bytes: tuple[int, int] | None = None

    def need(self, config: RunConfig, plan: Plan, settings: Mapping[str, Any] | None) -> Need:
        """What a run needs.

        Args:
            config: The settings.
            plan: What they come to on this machine.
            settings: DeepSpeed's configuration, filled in (`opens`); None without DeepSpeed.

        Returns:
            The need.

        Raises:
            ConfigError: Activations cannot be measured, or a setting not be read.
        """
        machine = self.inventory
        if plan.device != "cuda":
            machine = replace(machine, gpus=())
        activations = self.activation_bytes(config, settings or {})
        if self._shape is None:
            self._shape = measure(self.model)  # once: walking through a large model takes a while
        estimate = estimate_memory(
            self._shape,
            settings,
            num_processes=plan.num_processes,
            num_nodes=config.num_nodes,
            activation_bytes=activations,
            inventory=machine,
        )
        if settings is None:
            world = plan.num_processes * config.num_nodes
            estimate = _plain(estimate, self._plain_bytes(), world, activations)
        return Need(estimate=estimate, bars=bars_of(estimate, machine, settings or {}))

    def _plain_bytes(self) -> tuple[int, int]:
        """Bytes of the parameters in their own format, and of those that are trained."""
        if self._bytes is None:
            each = [
                (p.numel() * p.element_size(), p.requires_grad) for p in self.model.parameters()
            ]
            self._bytes = sum(size for size, _ in each), sum(size for size, own in each if own)
        return self._bytes

    def activation_bytes(self, config: RunConfig, settings: Mapping[str, Any]) -> int:
        """What activations need on a device: measured once for each batch and precision.

        Args:
            config: The settings.
            settings: Its DeepSpeed configuration.

        Returns:
            Bytes; 0 without a batch.
        """
        if self.sample_batch is None:
            return 0
        from nbaccel.deepspeed.batches import num_samples, resized

        size = settings.get("train_micro_batch_size_per_gpu")
        samples = size if isinstance(size, int) else num_samples(self.sample_batch)
        # What is kept for the backward pass is in 16 bits in all but float32.
        precision = "fp32" if config.mixed_precision == "no" else "bf16"
        key = (samples, precision, config.activation_checkpointing)
        if key not in self._activations:
            from nbaccel.deepspeed.activations import measure_activations

            self._activations[key] = measure_activations(
                self.model,
                resized(self.sample_batch, samples),
                precision=precision,
                gradient_checkpointing=config.activation_checkpointing,
            ).peak
        return self._activations[key]


def _plain(
    estimate: MemoryEstimate, sizes: tuple[int, int], world: int, activations: int
) -> MemoryEstimate:
    """Data-parallel training without DeepSpeed: weights, gradients and Adam in the model's format.

    Among several processes DDP keeps gradients twice, the second time in the buckets that it
    reduces (torch's documentation of ``gradient_as_bucket_view``). Mixed precision changes what
    activations need, and leaves weights in their own format.
    """
    parameters, trainable = sizes
    device = Bytes(
        parameters=parameters,
        gradients=trainable,
        optimizer=2 * trainable,
        buckets=trainable if world > 1 else 0,
        activations=activations,
    )
    return replace(estimate, device=device, host=Bytes(), nvme=Bytes(), nvme_free=None)


def bars_of(
    estimate: MemoryEstimate, machine: Inventory, settings: Mapping[str, Any]
) -> tuple[Bar, ...]:
    """An estimate as bars: one for each device, the host and the disk.

    Args:
        estimate: What is needed.
        machine: What there is; without GPUs processes compute in host memory.
        settings: The DeepSpeed configuration, which names the disk.

    Returns:
        The bars.
    """
    bars = []
    gpus = machine.gpus[: estimate.num_processes]
    for number, gpu in enumerate(gpus):
        # Processes that are more than there are cards share them in turn.
        sharing = len(range(number, estimate.num_processes, len(gpus)))
        label = f"cuda:{gpu.index} · {gpu.name}"
        bars.append(_bar(label, estimate.device * sharing, gpu.total_bytes, gpu.free_bytes))
    host = estimate.host
    label = "host memory"
    if not gpus:
        host = host + estimate.device * estimate.num_processes
        count = estimate.num_processes
        label += f" · {count} processes" if count > 1 else ""
    bars.append(_bar(label, host, machine.host_total_bytes, machine.host_available_bytes))
    if estimate.nvme.total:
        folder = next(iter(nvme_folders(settings)), Path())
        disk = shutil.disk_usage(nearest_folder(folder))
        bars.append(_bar(f"disk · {folder}", estimate.nvme, disk.total, disk.free))
    return tuple(bars)


def _bar(label: str, content: Bytes, capacity: int, free: int) -> Bar:
    moment = content.peak - content.total
    sizes = {kind: getattr(content, kind, 0) for kind in KINDS[:-1]} | {KINDS[-1]: moment}
    segments = [Segment("others", max(0, capacity - free))]
    segments += [Segment(kind, size) for kind, size in sizes.items()]
    segments.append(Segment("free", max(0, free - content.peak)))
    return Bar(
        label=label,
        capacity=capacity,
        segments=tuple(part for part in segments if part.bytes),
        needed=content.peak,
        lacking=max(0, content.peak - free) if capacity else 0,
    )


def told_together(bars: Sequence[Bar], tell: Callable[[Bar], str]) -> Iterator[str]:
    """What is to be told of each place; of several of which the same is told, once.

    Args:
        bars: The places.
        tell: What is to be told of one.

    Yields:
        A clause for each run of places.
    """
    for told, same in itertools.groupby(bars, key=tell):
        places = [bar.label.partition(" · ")[0] for bar in same]
        where = places[0] if len(places) == 1 else f"each of {places[0]} to {places[-1]}"
        yield f"{told} on {where}"
