"""``estimate_memory``: what a DeepSpeed run needs on each device, each host and the disk.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests hold them
against real engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.deepspeed.decided import decided, free_on_disk, memory_part
from nbaccel.deepspeed.settings import Settings, read_settings
from nbaccel.deepspeed.shape import Shape, shape_of
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Inventory, inspect_machine
from nbaccel.units import counted, format_bytes

__all__ = ["Bytes", "MemoryEstimate", "estimate_memory"]

_FP32 = 4
_REDUCED_AT_ONCE = 5 * 10**8
"""Gradients in a bucket without ZeRO: DeepSpeed's constant, which no setting changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Memory in one place, by what it holds.

    Attributes:
        parameters: The model as it computes.
        gradients: What the backward pass leaves for the optimizer.
        optimizer: Its states and its own copy of the parameters.
        buckets: Room to communicate, to gather parameters and to read from disk.
        activations: What the forward pass keeps for the backward pass, and what that adds.
        in_backward: What lives for a moment beside the activations: gradients on their way,
            gathered parameters.
        in_step: What lives for a moment when the optimizer begins, and activations are gone:
            gradients made flat, or in fp32.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    activations: int = 0
    in_backward: int = 0
    in_step: int = 0

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
    device, host, nvme = _places(settings, shape, world)
    gpus = machine.gpus[:num_processes]
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
            "On CPUs the system counts 5 to 20 % more: these are tensors, without what the "
            "allocator keeps of freed ones."
        )
    if not activation_bytes:
        notes.append("Activations are not in it: they depend on the batch.")
    if settings.unknown:
        names = ", ".join(settings.unknown)
        notes.append(f'Counted with DeepSpeed\'s defaults, since they are "auto": {names}.')
    return tuple(notes)


def _places(settings: Settings, shape: Shape, world: int) -> tuple[Bytes, Bytes, Bytes]:
    """What one process needs on its device, in host memory and on disk."""
    rule = (_stage_0, _stage_1_2, _stage_1_2, _stage_3)[settings.stage]
    return rule(settings, shape, world)


def _states(s: Settings, numel: int) -> int:
    return s.num_states * s.state_bytes * numel


def _stage_0(s: Settings, shape: Shape, world: int) -> tuple[Bytes, Bytes, Bytes]:
    """Everything everywhere. In 16 bit the optimizer has fp32 parameters and gradients."""
    half = s.parameter_bytes < _FP32
    # Gradients are made flat, a bucket at a time, to be reduced; in 16 bit the optimizer makes all
    # of them flat in its own format, beside those of the model.
    flat = (_FP32 + s.parameter_bytes) * shape.trainable
    device = Bytes(
        parameters=s.parameter_bytes * shape.total,
        gradients=_FP32 * shape.trainable,
        optimizer=_states(s, shape.trainable) + half * _FP32 * shape.trainable,
        in_step=flat if half else _FP32 * min(shape.trainable, _REDUCED_AT_ONCE),
    )
    return device, Bytes(), Bytes()


def _stage_1_2(s: Settings, shape: Shape, world: int) -> tuple[Bytes, Bytes, Bytes]:
    """The optimizer has a part of its own, also in fp32, where it is a copy of the parameters."""
    part = _part(shape.trainable, world)
    own = s.master_bytes * part  # its parameters, and once more its gradients
    device = Bytes(
        parameters=s.parameter_bytes * shape.total,
        buckets=_reduce_buffers(s),
    )
    states = Bytes(gradients=own, optimizer=own + _states(s, part))
    if s.optimizer_place == "none":
        # Stage 1 keeps whole gradients until the optimizer has taken its part of them.
        whole = s.gradient_bytes * shape.trainable if s.stage == 1 else 0
        more = Bytes(gradients=max(0, whole - own), in_step=own)
        return device + states + more, Bytes(), Bytes()
    # On their way back to the device the new parameters are rounded into a copy of their own; a
    # gradient on its way to the host passes through a buffer on either side.
    copy = Bytes(parameters=s.parameter_bytes * part)
    passing = Bytes(buckets=s.parameter_bytes * max(shape.sizes, default=shape.largest_layer))
    leaving = Bytes(in_backward=s.gradient_bytes * shape.trainable)
    return device + passing + leaving, states + copy + passing, Bytes()


def _stage_3(s: Settings, shape: Shape, world: int) -> tuple[Bytes, Bytes, Bytes]:
    """Parameters are divided, too; what is needed next is gathered."""
    everything, part = _part(shape.total, world), _part(shape.trainable, world)
    parameters = Bytes(parameters=s.parameter_bytes * everything)
    # Tensors that are too small to be worth it stay whole, beside their parts.
    reduced = s.reduce_bucket * s.contiguous if shape.trainable else 0
    whole = reduced + shape.at_most(s.persist)
    device = Bytes(buckets=s.parameter_bytes * whole)
    own = s.master_bytes * part  # in fp32, too
    kept = s.gradient_bytes * part
    update = s.master_bytes * (min(s.sub_group, part) if s.optimizer_place != "cpu" else part)
    optimizer = Bytes(optimizer=own + _states(s, part))
    gradients = Bytes(gradients=kept + update)
    host, nvme = Bytes(), Bytes()
    if s.parameter_place == "none":
        device += parameters
    elif s.parameter_place == "cpu":
        host += parameters
    else:
        nvme += parameters
        host += Bytes(buckets=s.parameter_bytes * s.swap_buffer * s.num_swap_buffers)
    # Parameters gathered for the forward pass stay for the backward pass, as many as may live.
    at_once = max(s.live, s.prefetch + shape.largest_layer)
    gathered = s.parameter_bytes * min(at_once, shape.total)
    if s.optimizer_place == "none":
        rounded = kept if s.gradient_bytes < s.master_bytes else 0
        moments = Bytes(in_backward=max(0, gathered - update), in_step=rounded)
        return device + optimizer + gradients + moments, host, nvme
    device += Bytes(in_backward=gathered + 3 * s.gradient_bytes * shape.largest_layer)
    if s.optimizer_place == "cpu":
        return device, host + optimizer + gradients, nvme
    # On disk are gradients in the optimizer's format, too; a group of all of it is read at a time.
    group = Bytes(buckets=s.master_bytes * s.num_state_buffers * min(s.sub_group, part))
    return device, host + Bytes(gradients=kept) + group, nvme + optimizer + Bytes(gradients=own)


def _reduce_buffers(s: Settings) -> int:
    if not s.contiguous:
        return 0
    return s.parameter_bytes * s.reduce_bucket * (2 if s.overlap else 1)


def _part(numel: int, world: int) -> int:
    return -(-numel // world)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
