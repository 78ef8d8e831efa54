"""``estimate_memory``: what a DeepSpeed run needs on each device, each host and the disk.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests hold them
against real engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.deepspeed.counting import Bytes, places
from nbaccel.deepspeed.decided import decided, free_on_disk, memory_part
from nbaccel.deepspeed.settings import Settings, read_settings
from nbaccel.deepspeed.shape import Shape, shape_of
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Inventory, inspect_machine
from nbaccel.units import counted, format_bytes

__all__ = ["Bytes", "MemoryEstimate", "estimate_memory"]

_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "total", "peak")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryEstimate:
    """What a run needs, and what this machine has.

    Attributes:
        device: On each device. Where processes compute on the CPU this is host memory, too.
        host: On each host, for all of its processes.
        nvme: On each host's disk.
        shape: The model.
        settings: What of the configuration was counted.
        num_processes: Processes on each host.
        num_nodes: Hosts.
        device_free: Free memory of the fullest GPU used; None where there is none.
        host_free: Free memory of this host.
        nvme_free: Free space where the configuration swaps to; None where it names no folder.
        notes: What to know about these numbers.
    """

    device: Bytes
    host: Bytes
    nvme: Bytes
    shape: Shape
    settings: Settings
    num_processes: int
    num_nodes: int
    device_free: int | None
    host_free: int
    nvme_free: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def host_needed(self) -> int:
        """Host memory in all: with what processes compute in, where that is host memory."""
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
        device_free = "" if self.device_free is None else format_bytes(self.device_free)
        nvme_free = "" if self.nvme_free is None else format_bytes(self.nvme_free)
        host_free = format_bytes(self.host_free)
        lines.append(("free now", device_free or "(is host)", host_free, nvme_free))
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        return "\n".join([self._head(), *table, self._verdict(), *self.notes])

    def __repr__(self) -> str:
        return f"<MemoryEstimate: {self._head()}: {self._verdict()}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        head, *rows = self.rows()
        cells = "".join(f"<th>{escape(text)}</th>" for text in head)
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(row[0])}</th>"
            + "".join(f"<td style='text-align:right'>{escape(text)}</td>" for text in row[1:])
            + "</tr>"
            for row in rows
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in (self._verdict(), *self.notes))
        return (
            f"<p>{escape(self._head())}</p><table><thead><tr>{cells}</tr></thead>"
            f"<tbody>{body}</tbody></table>{notes}"
        )

    def _head(self) -> str:
        s = self.settings
        offloaded = [
            f"{what} on {place}"
            for what, place in (("optimizer", s.optimizer_place), ("parameters", s.parameter_place))
            if place != "none"
        ]
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        start = f"{self.shape.total:,} parameters, ZeRO-{s.stage}, {s.precision}"
        return ", ".join([start, *offloaded, f"{counted(self.num_nodes, 'host')} of {processes}"])

    def _verdict(self) -> str:
        if self.fits:
            return "fits into what is free now"
        words = {"device": "per device", "host": "of host memory", "nvme": "of disk"}
        missing = [f"{format_bytes(size)} {words[name]}" for name, size in self.lacking.items()]
        return f"does not fit: {' and '.join(missing)} too little"


def estimate_memory(
    model_or_shape: Any,
    config: Mapping[str, Any] | str | Path | Any = None,
    *,
    num_processes: int = 1,
    num_nodes: int = 1,
    sample_batch: Any = None,
    gradient_checkpointing: bool = False,
    activation_bytes: int = 0,
    run: RunConfig | None = None,
    inventory: Inventory | None = None,
) -> MemoryEstimate:
    """Estimate what a DeepSpeed run needs, before anything is allocated.

    Args:
        model_or_shape: A module, also on ``meta``, or (parameters, parameters of the largest
            layer).
        config: DeepSpeed's configuration: a mapping, a file, or a `ZeroConfig`. None: plain
            data-parallel training in fp32. What is ``"auto"`` in it is filled in by the rules of
            `resolve_auto`.
        num_processes: Processes on each host.
        num_nodes: Hosts.
        sample_batch: What one process calls the model with: its activations are measured, on a
            copy that has no memory. Where the configuration names another
            ``train_micro_batch_size_per_gpu``, it is cut or repeated to that.
        gradient_checkpointing: Whether it will be turned on; a model in which it is on already,
            or that calls ``torch.utils.checkpoint`` itself, is measured as it is.
        activation_bytes: What is needed for activations on a device, where that is known.
        run: How it will be run; decides what is ``"auto"``.
        inventory: What the machine has; None looks at this one.

    Returns:
        The estimate, to print or to show in a cell.

    Raises:
        ConfigError: The model's size or a setting cannot be read, or activations not be measured.
    """
    _check_arguments(model_or_shape, num_processes, num_nodes, sample_batch, activation_bytes)
    shape = shape_of(model_or_shape)
    world = num_processes * num_nodes
    part = decided(memory_part(config), model_or_shape, world_size=world, run=run)
    settings = read_settings(part)
    if sample_batch is not None:
        batch = _cut(sample_batch, part.get("train_micro_batch_size_per_gpu"))
        activation_bytes = _activation_bytes(
            model_or_shape, batch, settings.precision, gradient_checkpointing
        )
    machine = inventory or inspect_machine()
    gpus = machine.gpus[:num_processes]
    device, host, nvme = places(settings, shape, world, on_cpu=not gpus)
    return MemoryEstimate(
        device=device + Bytes(activations=activation_bytes),
        host=host * num_processes,
        nvme=nvme * num_processes,
        shape=shape,
        settings=settings,
        num_processes=num_processes,
        num_nodes=num_nodes,
        device_free=min((gpu.free_bytes for gpu in gpus), default=None),
        host_free=machine.host_available_bytes,
        nvme_free=free_on_disk(part) if nvme.total else None,
        notes=_notes(settings, activation_bytes, on_cpu=not gpus),
    )


def _check_arguments(
    model: Any, num_processes: int, num_nodes: int, sample_batch: Any, activation_bytes: int
) -> None:
    mistakes = []
    if num_processes < 1 or num_nodes < 1:
        mistakes.append(
            f"num_processes={num_processes} on num_nodes={num_nodes} is nobody: memory is divided "
            "among them. Use 1 or more of each."
        )
    if sample_batch is not None and not callable(getattr(model, "modules", None)):
        mistakes.append(
            f"sample_batch needs the model itself: got {model!r}, with which nothing can be "
            "measured. Give the module (it may be on meta), or activation_bytes."
        )
    if sample_batch is not None and activation_bytes:
        mistakes.append(
            f"activation_bytes={activation_bytes} and sample_batch were both given, and one would "
            "silently beat the other. Give one of them."
        )
    if mistakes:
        raise ConfigError(*mistakes)


def _cut(sample_batch: Any, samples: int | None) -> Any:
    from nbaccel.deepspeed.batches import resized

    return sample_batch if samples is None else resized(sample_batch, samples)


def _activation_bytes(model: Any, batch: Any, precision: str, checkpointing: bool) -> int:
    from nbaccel.deepspeed.activations import measure_activations  # torch's fakes take a second

    return measure_activations(
        model, batch, precision=precision, gradient_checkpointing=checkpointing
    ).peak


def _notes(settings: Settings, activation_bytes: int, *, on_cpu: bool) -> tuple[str, ...]:
    notes = []
    if on_cpu:
        notes.append(
            "On CPUs the system may count a third more while memory is plentiful: these are "
            "tensors, and glibc keeps freed ones. Where memory is short, they are returned."
        )
    if not activation_bytes:
        notes.append("Activations are not in it: they depend on the batch.")
    if settings.unknown:
        names = ", ".join(settings.unknown)
        notes.append(f'Counted with DeepSpeed\'s defaults, since they are "auto": {names}.')
    return tuple(notes)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
