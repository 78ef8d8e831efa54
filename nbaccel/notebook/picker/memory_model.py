"""The memory of a run by place, as bars against what the machine has."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbaccel.base.disk import nearest_folder
from nbaccel.base.units import format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.memory.estimate import Bytes, MemoryEstimate, replicated
from nbaccel.memory.fsdp_memory import WrappedSizes, fsdp_estimate, wrapped_sizes
from nbaccel.memory.model_size import Shape, measure
from nbaccel.memory.model_states import ShortFormats, model_states, short_formats
from nbaccel.memory.settings_form import SettingsForm
from nbaccel.plan import Inventory, Plan, registry

__all__ = [
    "SEGMENT_KINDS",
    "SEGMENT_NAMES",
    "BarSegment",
    "MemoryBar",
    "MemoryModel",
    "MemoryNeed",
    "bars_of",
    "joined_text",
]


_SHARDED_BY_TORCH = "fsdp"

SEGMENT_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "moment")
"""The contents of memory, in the order of the bars; ``moment`` is freed within the step."""

SEGMENT_NAMES = {"others": "in use by others", "buckets": "buffers", "moment": "temporary"}
"""Names of kinds that the word itself does not explain."""


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar.

    Attributes:
        kind: One of `SEGMENT_KINDS`, ``others`` (in use already) or ``free``.
        bytes: Its size.
    """

    kind: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """Memory in one place.

    Attributes:
        label: Which place: ``cuda:0 · NVIDIA H100``, ``host memory``.
        capacity: Bytes in all; 0 where that is unknown.
        segments: What is in it, in order; ``free`` comes last.
        needed: Bytes that the run needs there.
        lacking: Bytes that it needs and that are not free.
    """

    label: str
    capacity: int
    segments: tuple[BarSegment, ...]
    needed: int
    lacking: int

    def text(self) -> str:
        """The bar in words."""
        segment_texts = [
            f"{SEGMENT_NAMES.get(segment.kind, segment.kind)} {format_bytes(segment.bytes)}"
            for segment in self.segments
            if segment.bytes and segment.kind != "free"
        ]
        free_bytes = sum(segment.bytes for segment in self.segments if segment.kind == "free")
        last_clause = f"{format_bytes(self.lacking)} too little" if self.lacking else ""
        last_clause = last_clause or f"{format_bytes(free_bytes)} left free"
        capacity_text = f" of {format_bytes(self.capacity)}" if self.capacity else ""
        segments_text = ", ".join(segment_texts) or "nothing"
        needs = f"needs {format_bytes(self.needed)}{capacity_text} ({segments_text})"
        return f"{self.label}: {needs}, {last_clause}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """What one choice of settings needs.

    Attributes:
        estimate: The numbers, as the strategy or plain data-parallel training needs them.
        bars: The same, against the memory of the machine.
    """

    estimate: MemoryEstimate
    bars: tuple[MemoryBar, ...]

    @property
    def lacking(self) -> int:
        """Bytes that are missing, over all places."""
        return sum(bar.lacking for bar in self.bars)


@dataclass(kw_only=True)
class MemoryModel:
    """Measures choices against one model."""

    model: Any
    sample_batch: Any
    inventory: Inventory
    _activations: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    _shape: Shape | None = None
    _states: dict[tuple[int, ShortFormats | None], Bytes] = field(default_factory=dict)
    _wrapped: dict[str, WrappedSizes] = field(default_factory=dict)
    _operations: float | None = None

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        if self._shape is None:
            self._shape = measure(self.model)  # kept: counting a large model takes a while
        return self._shape

    @property
    def num_samples(self) -> int | None:
        """Samples in the batch; None without one."""
        if self.sample_batch is None:
            return None
        from nbaccel.memory.activations import num_samples

        return num_samples(self.sample_batch)

    def operations_per_sample(self) -> float | None:
        """Floating-point operations of a forward pass with one sample; None without a batch."""
        if self.sample_batch is None:
            return None
        if self._operations is None:
            # Not at the top: it imports torch.
            from nbaccel.memory.operations import forward_operations

            counted = forward_operations(self.model, self.sample_batch)
            self._operations = counted / max(1, self.num_samples or 1)
        return self._operations

    def need(
        self,
        config: RunConfig,
        plan: Plan,
        form: SettingsForm | None,
        document: Mapping[str, Any],
        *,
        samples: int | None = None,
    ) -> MemoryNeed:
        """What a run needs."""
        machine = self.inventory
        machine = replace(machine, gpus=registry.device(plan.device).units(machine))
        told_samples = None if form is None else form.batch_size(document)
        inputs: dict[str, Any] = {
            "num_processes": plan.num_processes,
            "num_nodes": config.num_nodes,
            "activation_bytes": self.activation_bytes(config, told_samples or samples),
            "inventory": machine,
        }
        if form is not None:
            memory_estimate = form.estimate(self.shape, document, **inputs)
        elif plan.strategy == _SHARDED_BY_TORCH:
            memory_estimate = self._sharded(config, plan, inputs)
        else:
            formats = short_formats(config, plan.device)
            memory_estimate = replicated(
                self.shape,
                states=self._states_at(plan.num_processes * config.num_nodes, formats),
                level="" if formats is None else formats.level,
                **inputs,
            )
        return MemoryNeed(estimate=memory_estimate, bars=bars_of(memory_estimate, machine))

    def _sharded(self, config: RunConfig, plan: Plan, inputs: Mapping[str, Any]) -> MemoryEstimate:
        settings = dict(config.fsdp or {})
        key = repr(sorted(settings.items()))
        if key not in self._wrapped:
            self._wrapped[key] = wrapped_sizes(self.model, settings)
        return fsdp_estimate(
            self.shape,
            self._wrapped[key],
            compute_bytes=4 if config.mixed_precision == "no" else 2,
            offloads=bool(settings.get("cpu_offload"))
            and not device_row(plan.device).in_host_memory,
            **inputs,
        )

    def _states_at(self, world_size: int, formats: ShortFormats | None) -> Bytes:
        """Parameters, gradients and optimizer: counted once for each level."""
        key = (world_size, formats)
        if key not in self._states:
            self._states[key] = model_states(self.model, world_size=world_size, formats=formats)
        return self._states[key]

    def has_measured(self, config: RunConfig) -> bool:
        """Whether activations are known, so that a need is found in a moment."""
        measured = (_measured_precision(config), config.activation_checkpointing)
        return self.sample_batch is None or any(key[1:] == measured for key in self._activations)

    def activation_bytes(self, config: RunConfig, batch_size: int | None) -> int:
        """What activations need on a device: measured once for each batch and precision."""
        if self.sample_batch is None:
            return 0
        # Not at the top: it imports torch, which a form without a batch need not wait for.
        from nbaccel.memory.activations import num_samples, resized

        sample_count = num_samples(self.sample_batch) if batch_size is None else batch_size
        precision = _measured_precision(config)
        cache_key = (sample_count, precision, config.activation_checkpointing)
        own_samples = num_samples(self.sample_batch)
        if cache_key not in self._activations and sample_count > own_samples:
            # In proportion: what does not grow with the batch is counted too often then, and a
            # measurement of a large model takes a second.
            own_bytes = self.activation_bytes(config, own_samples)
            return -(-own_bytes * sample_count // max(1, own_samples))
        if cache_key not in self._activations:
            from nbaccel.memory.activations import measure_activations

            measured = measure_activations(
                self.model,
                resized(self.sample_batch, sample_count),
                precision=precision,
                gradient_checkpointing=config.activation_checkpointing,
            )
            self._activations[cache_key] = measured.peak
            if sample_count == own_samples and measured.forward_flops is not None:
                self._operations = measured.forward_flops / max(1, own_samples)
        return self._activations[cache_key]


def _measured_precision(config: RunConfig) -> str:
    """All precisions but float32 keep 16-bit values for the backward pass: one serves them all."""
    return "fp32" if config.mixed_precision == "no" else "bf16"


def bars_of(memory_estimate: MemoryEstimate, machine: Inventory) -> tuple[MemoryBar, ...]:
    """An estimate as bars: one for each device, the host and the disk."""
    memory_bars = []
    gpus = (machine.gpus or registry.usable_units(machine))[: memory_estimate.num_processes]
    for gpu_number, gpu in enumerate(gpus):
        # More processes than cards share the cards in turn.
        processes = len(range(gpu_number, memory_estimate.num_processes, len(gpus)))
        device_label = f"{gpu.kind}:{gpu.index} · {gpu.name}"
        memory_bars.append(
            _memory_bar(
                device_label,
                memory_estimate.device * processes,
                gpu.total_bytes,
                gpu.free_bytes,
            )
        )
    host_bytes = memory_estimate.host
    device_label = "host memory"
    # Processes then compute in host memory, so their needs add up there.
    if not gpus:
        host_bytes = host_bytes + memory_estimate.device * memory_estimate.num_processes
        process_count = memory_estimate.num_processes
        device_label += f" · {process_count} processes" if process_count > 1 else ""
    memory_bars.append(
        _memory_bar(
            device_label, host_bytes, machine.host_total_bytes, machine.host_available_bytes
        )
    )
    if memory_estimate.nvme.total:
        nvme_folder = next(iter(memory_estimate.nvme_folders), Path())
        disk_usage = shutil.disk_usage(nearest_folder(nvme_folder))
        memory_bars.append(
            _memory_bar(
                f"disk · {nvme_folder}", memory_estimate.nvme, disk_usage.total, disk_usage.free
            )
        )
    return tuple(memory_bars)


def _memory_bar(label: str, needed_bytes: Bytes, capacity_bytes: int, free_bytes: int) -> MemoryBar:
    moment_bytes = needed_bytes.peak - needed_bytes.total
    sizes_by_kind = {kind: getattr(needed_bytes, kind, 0) for kind in SEGMENT_KINDS[:-1]} | {
        SEGMENT_KINDS[-1]: moment_bytes
    }
    bar_segments = [BarSegment("others", max(0, capacity_bytes - free_bytes))]
    bar_segments += [
        BarSegment(kind, segment_bytes) for kind, segment_bytes in sizes_by_kind.items()
    ]
    bar_segments.append(BarSegment("free", max(0, free_bytes - needed_bytes.peak)))
    return MemoryBar(
        label=label,
        capacity=capacity_bytes,
        segments=tuple(bar_segment for bar_segment in bar_segments if bar_segment.bytes),
        needed=needed_bytes.peak,
        # A capacity of 0 is unknown, so nothing can be said to be lacking.
        lacking=max(0, needed_bytes.peak - free_bytes) if capacity_bytes else 0,
    )


def joined_text(
    memory_bars: Sequence[MemoryBar], bar_text: Callable[[MemoryBar], str]
) -> Iterator[str]:
    """A clause per place; neighbouring places with the same clause share one."""
    for shared_text, same_bars in itertools.groupby(memory_bars, key=bar_text):
        names = [memory_bar.label.partition(" · ")[0] for memory_bar in same_bars]
        place_text = names[0] if len(names) == 1 else f"each of {names[0]} to {names[-1]}"
        yield f"{shared_text} on {place_text}"
