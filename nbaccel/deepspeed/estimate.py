"""``estimate_memory``: what a DeepSpeed run needs on each device, each host and the disk.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests hold them
against real engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nbaccel.deepspeed.settings import Settings, read_settings
from nbaccel.deepspeed.shape import Shape, shape_of
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Inventory, inspect_machine
from nbaccel.units import counted, format_bytes

__all__ = ["Bytes", "MemoryEstimate", "estimate_memory"]

_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Memory in one place, by what it holds.

    Attributes:
        parameters: The model as it computes.
        gradients: What the backward pass leaves for the optimizer.
        optimizer: Its states and its own copy of the parameters.
        buckets: Room to communicate, to gather parameters and to read from disk.
        activations: What the forward pass keeps for the backward pass.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    activations: int = 0

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer: what ZeRO divides."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.model_states + self.buckets + self.activations

    def __mul__(self, times: int) -> Bytes:
        return Bytes(**{name: getattr(self, name) * times for name in _KINDS})

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(**{name: getattr(self, name) + getattr(other, name) for name in _KINDS})


_KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations")


@dataclass(frozen=True, kw_only=True, slots=True)
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
    notes: tuple[str, ...] = ()

    @property
    def host_needed(self) -> int:
        """Host memory in all: with what processes compute in, where that is host memory."""
        on_cpu = self.device * self.num_processes if self.device_free is None else Bytes()
        return self.host.total + on_cpu.total

    @property
    def fits(self) -> bool:
        """Whether this machine has what it takes, as far as it is free now."""
        room = self.device_free is None or self.device.total <= self.device_free
        return room and self.host_needed <= self.host_free

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a head, one line per kind of content, totals and what is free."""
        places = (self.device, self.host, self.nvme)
        lines: list[tuple[str, ...]] = [("", "per device", "per host", "NVMe per host")]
        lines += [(kind, *(_size(getattr(p, kind)) for p in places)) for kind in _KINDS]
        lines.append(("total", *(_size(place.total) for place in places)))
        device_free = "" if self.device_free is None else format_bytes(self.device_free)
        lines.append(("free now", device_free or "(is host)", format_bytes(self.host_free), ""))
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        return "\n".join([self._head(), *table, self._verdict(), *self.notes])

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
        lacking = []
        if self.device_free is not None and self.device.total > self.device_free:
            lacking.append(f"{format_bytes(self.device.total - self.device_free)} per device")
        if self.host_needed > self.host_free:
            lacking.append(f"{format_bytes(self.host_needed - self.host_free)} of host memory")
        return f"does not fit: {' and '.join(lacking)} too little"


def estimate_memory(
    model_or_shape: Any,
    config: Mapping[str, Any] | str | Path | Any = None,
    *,
    num_processes: int = 1,
    num_nodes: int = 1,
    activation_bytes: int = 0,
    inventory: Inventory | None = None,
) -> MemoryEstimate:
    """Estimate what a DeepSpeed run needs, before anything is allocated.

    Args:
        model_or_shape: A module, also on ``meta``, or (parameters, parameters of the largest
            layer).
        config: DeepSpeed's configuration: a mapping, a file, or a `ZeroConfig`. None: plain
            data-parallel training in fp32.
        num_processes: Processes on each host.
        num_nodes: Hosts.
        activation_bytes: What a forward pass keeps on a device, where it is known.
        inventory: What the machine has; None looks at this one.

    Returns:
        The estimate, to print or to show in a cell.

    Raises:
        ConfigError: The model's size or a setting cannot be read.
    """
    if num_processes < 1 or num_nodes < 1:
        raise ConfigError(
            f"num_processes={num_processes} on num_nodes={num_nodes} is nobody: memory is divided "
            "among them. Use 1 or more of each."
        )
    shape = shape_of(model_or_shape)
    settings = read_settings(_mapping(config))
    machine = inventory or inspect_machine()
    world = num_processes * num_nodes
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
        notes=_notes(settings, activation_bytes),
    )


def _mapping(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"A DeepSpeed configuration cannot be read from {config!r}: {error}. The estimate "
            "depends on it. Give a dict, the path of a JSON file, or a ZeroConfig."
        ) from error
    return dict(found)


def _notes(settings: Settings, activation_bytes: int) -> tuple[str, ...]:
    notes = []
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
    master = _FP32 if s.parameter_bytes < _FP32 else 0
    device = Bytes(
        parameters=s.parameter_bytes * shape.total,
        gradients=_FP32 * shape.trainable,
        optimizer=_states(s, shape.trainable) + master * shape.trainable,
        buckets=s.parameter_bytes * min(shape.trainable, s.reduce_bucket) if world > 1 else 0,
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
        more = max(0, whole - own)
        return device + states + Bytes(gradients=more), Bytes(), Bytes()
    # On their way back to the device the new parameters are rounded into a copy of their own; a
    # gradient on its way to the host passes through a buffer on either side.
    copy = Bytes(parameters=s.parameter_bytes * part)
    passing = Bytes(buckets=s.parameter_bytes * max(shape.sizes, default=shape.largest_layer))
    return device + passing, states + copy + passing, Bytes()


def _stage_3(s: Settings, shape: Shape, world: int) -> tuple[Bytes, Bytes, Bytes]:
    """Parameters are divided, too; what is needed next is gathered."""
    everything, part = _part(shape.total, world), _part(shape.trainable, world)
    parameters = Bytes(parameters=s.parameter_bytes * everything)
    # Tensors that are too small to be worth it stay whole, beside their parts.
    ahead = min(s.prefetch, shape.total) + shape.largest_layer + shape.at_most(s.persist)
    device = Bytes(buckets=s.parameter_bytes * (s.reduce_bucket * s.contiguous + ahead))
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
    if s.optimizer_place == "none":
        device += optimizer + gradients
    elif s.optimizer_place == "cpu":
        host += optimizer + gradients
    else:
        nvme += optimizer
        host += gradients
    return device, host, nvme


def _reduce_buffers(s: Settings) -> int:
    if not s.contiguous:
        return 0
    return s.parameter_bytes * s.reduce_bucket * (2 if s.overlap else 1)


def _part(numel: int, world: int) -> int:
    return -(-numel // world)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
