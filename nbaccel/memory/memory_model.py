"""One model on one machine: what a run of it needs, with what was measured kept.

For DDP and FSDP weights, gradients and moments have the format of their parameter, whatever the
precision, but for MS-AMP's levels: see the table in `nbaccel.precision.native_fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.capabilities import device_row, fp8_backend, precision_row
from nbaccel.memory import estimate
from nbaccel.memory.estimate import Bytes, MemoryEstimate, MemoryNeed, Shape, torch_estimate
from nbaccel.memory.settings_form import SettingsForm
from nbaccel.plan import Gpu, Inventory, Plan, registry

if TYPE_CHECKING:
    from torch import nn


FSDP = "fsdp"


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes that may be used: on each device, of the host, of the disk; None: what is free."""

    device: int | None = None
    host: int | None = None
    nvme: int | None = None

    def of(self, machine: Inventory, num_processes: int) -> Inventory:
        """The machine with no more than that, and with devices where some are asked for."""
        # A size of 0 would stand for one that is not known.
        sizes: dict[str, Any]
        if self.device is not None:
            made_up = (Gpu(index=number, name="device") for number in range(num_processes))
            units = machine.gpus or tuple(made_up)
            sizes = {"total_bytes": self.device or 1, "free_bytes": self.device}
            machine = replace(machine, gpus=tuple(replace(one, **sizes) for one in units))
        if self.host is not None:
            sizes = {"host_total_bytes": self.host or 1, "host_available_bytes": self.host}
            machine = replace(machine, **sizes)
        return machine


@dataclass(kw_only=True)
class MemoryModel:
    """Measures runs of one model."""

    model: Any
    sample_batch: Any
    inventory: Inventory
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    num_nodes: int | None = None  # none: as many as the run says
    _activations: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    _wrapped: dict[str, WrappedSizes] = field(default_factory=dict)

    @cached_property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return estimate.measure(self.model)

    @property
    def num_samples(self) -> int | None:
        """Samples in the batch; None without one."""
        if self.sample_batch is None:
            return None
        # Not at the top: it imports torch, which a form without a batch need not wait for.
        from nbaccel.memory.activations import num_samples

        return num_samples(self.sample_batch)

    def need(
        self,
        config: RunConfig,
        plan: Plan,
        form: SettingsForm | None,
        document: Mapping[str, Any],
        *,
        samples: int | None = None,
    ) -> MemoryNeed:
        """What a run needs; `form` and `document` are those of the strategy that it has chosen."""
        machine = replace(self.inventory, gpus=registry.device(plan.device).units(self.inventory))
        machine = self.limits.of(machine, plan.num_processes)
        told_samples = None if form is None else form.batch_size(document)
        inputs: dict[str, Any] = {
            "num_processes": plan.num_processes,
            "num_nodes": self.num_nodes or config.num_nodes,
            "activation_bytes": self.activation_bytes(config, told_samples or samples),
            "inventory": machine,
        }
        if form is not None:
            found = form.estimate(self.shape, document, **inputs)
        elif plan.strategy == FSDP:
            found = self._sharded(config, plan, inputs)
        else:
            formats = short_formats(config, plan.device)
            world_size = plan.num_processes * inputs["num_nodes"]
            strategy = "data parallel"
            strategy += "" if formats is None else f", fp8 at MS-AMP's {formats.level}"
            states = self.states(world_size, formats)
            found = torch_estimate(self.shape, strategy=strategy, states=states, **inputs)
        if self.limits.nvme is not None:
            found = replace(found, nvme_free=self.limits.nvme)
        return MemoryNeed(estimate=found, bars=estimate.bars_of(found, machine))

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

    def states(self, world_size: int, formats: ShortFormats | None) -> Bytes:
        """Parameters, gradients and optimizer of one process; a file's headers tell them, too."""
        return model_states(self.model, world_size=world_size, formats=formats)

    def activation_bytes(self, config: RunConfig, batch_size: int | None) -> int:
        """What activations need on a device: measured once for each batch and precision."""
        own_samples = self.num_samples
        if own_samples is None:
            return 0
        from nbaccel.memory.activations import measure_activations, resized

        samples = batch_size or own_samples
        # All but float32 keep 16-bit values for the backward pass: one serves them all.
        precision = "fp32" if config.mixed_precision == "no" else "bf16"
        key = (samples, precision, config.activation_checkpointing)
        if key not in self._activations and samples > own_samples:
            # In proportion, as a measurement of a large model takes a second.
            own_bytes = self.activation_bytes(config, own_samples)
            return -(-own_bytes * samples // max(1, own_samples))
        if key not in self._activations:
            self._activations[key] = measure_activations(
                self.model,
                resized(self.sample_batch, samples),
                precision=precision,
                gradient_checkpointing=config.activation_checkpointing,
            )
        return self._activations[key]


_FLOAT32_BYTES = 4
_COPIES_IN_STEP = {"O1": 3, "O2": 5}
"""float32 copies while Adam steps: of weight, gradient and divisor, then also of both moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortFormats:
    """Which of MS-AMP's levels a run trains at, ``O1`` or ``O2``, and how."""

    level: str
    skip_first_and_last: bool
    accumulation_steps: int


def short_formats(run: RunConfig | None, device: str = "") -> ShortFormats | None:
    """The level that a run asks for."""
    if run is None or not precision_row(run.mixed_precision).has_backends:
        return None
    fp8 = run.fp8 or Fp8Config()
    row = fp8_backend(fp8.backend, device_row(device) if device else None).row
    if row is None or "opt_level" not in row.settings:
        return None
    return ShortFormats(
        level=fp8.opt_level,
        # Levels convert all layers unless they are told otherwise.
        skip_first_and_last=bool(fp8.skip_first_and_last),
        accumulation_steps=run.gradient_accumulation_steps or 1,
    )


def model_states(
    model: nn.Module, *, world_size: int = 1, formats: ShortFormats | None = None
) -> Bytes:
    """What one process keeps with Adam, without activations."""
    if formats is not None:
        return _short_states(model, world_size, formats)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    trained_bytes = sum(size for size, is_trained in sizes if is_trained)
    return Bytes(
        parameters=sum(size for size, _ in sizes),
        gradients=trained_bytes,
        optimizer=2 * trained_bytes,  # Adam's two moments
        # DDP keeps gradients twice, in the buckets that it reduces, too.
        buckets=trained_bytes if world_size > 1 else 0,
    )


def _short_states(model: nn.Module, world_size: int, formats: ShortFormats) -> Bytes:
    # Not at the top: they import torch, which an estimate from plain numbers need not wait for.
    from nbaccel.precision.fp8.scaled_tensor import E4M3, FP16, accumulation_format
    from nbaccel.precision.fp8_layers import select_layers, unshared_weights

    if not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"The memory of MS-AMP's {formats.level} depends on which weights belong to linear "
            f"layers: got {model!r}. Give the module (it may be on meta)."
        )
    selection = select_layers(model, skip_first_and_last=formats.skip_first_and_last)
    short_weights = {id(weight) for weight in unshared_weights(model, selection)}
    weight_bytes = FP16.dtype.itemsize
    gradient_bytes = accumulation_format(formats.accumulation_steps).dtype.itemsize
    moment_bytes = E4M3.dtype.itemsize + FP16.dtype.itemsize
    parameters = list(model.parameters())
    kept = 0
    gradients = 0
    buckets = 0
    optimizer = 0
    for parameter in parameters:
        count = parameter.numel()
        is_short = id(parameter) in short_weights
        own_bytes = count * parameter.element_size()
        kept += weight_bytes * count if is_short else own_bytes
        if not parameter.requires_grad:
            continue
        gradients += gradient_bytes * count if is_short else own_bytes
        buckets += 0 if is_short else own_bytes
        optimizer += 2 * own_bytes if formats.level == "O1" else moment_bytes * count
    largest = max((item.numel() for item in parameters if item.requires_grad), default=0)
    return Bytes(
        parameters=kept,
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets if world_size > 1 else 0,
        in_step=_FLOAT32_BYTES * _COPIES_IN_STEP[formats.level] * largest,
    )


# torch's ``fully_shard``: each process keeps a part of parameters, gradients and optimizer states
# (Rajbhandari et al. 2020, ZeRO, section 5.3). Wrapped layers are gathered in the format of the
# computation, the next one ahead; the rest stays gathered (``reshard_after_forward``).

_GATHERED_LAYERS = 2  # the one that computes and the one that is gathered ahead
_REDUCED_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedSizes:
    """How a model is cut into layers that are gathered together."""

    kept_bytes: int  # of all parameters
    trained_bytes: int  # of those that get gradients
    largest_layer: int  # parameters of the largest layer
    root: int  # parameters that no layer holds


def wrapped_sizes(model: nn.Module, settings: Mapping[str, Any] | None = None) -> WrappedSizes:
    """Find the layers that ``prepare`` would wrap."""
    # Not at the top: it imports torch, which a form without a model need not wait for.
    from nbaccel.config.handlers import FullyShardedDataParallelPlugin
    from nbaccel.strategies.model_blocks import choose_modules

    plugin = FullyShardedDataParallelPlugin(**dict(settings or {}))
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    held_by_layers: set[int] = set()
    largest_layer = 0
    for layer in choose_modules(model, plugin):
        own_keys = {id(parameter) for parameter in layer.parameters()} - held_by_layers
        held_by_layers |= own_keys
        largest_layer = max(largest_layer, sum(sizes[key] for key in own_keys))
    byte_sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    return WrappedSizes(
        kept_bytes=sum(size for size, _ in byte_sizes),
        trained_bytes=sum(size for size, is_trained in byte_sizes if is_trained),
        largest_layer=largest_layer,
        root=sum(size for key, size in sizes.items() if key not in held_by_layers),
    )


def fsdp_estimate(
    shape: Shape, sizes: WrappedSizes, *, compute_bytes: int, offloads: bool, **inputs: Any
) -> MemoryEstimate:
    """Sharded training with Adam; `inputs` are those of `torch_estimate`."""
    num_processes: int = inputs["num_processes"]
    world_size = num_processes * inputs["num_nodes"]
    shards = Bytes(
        parameters=-(-sizes.kept_bytes // world_size),
        gradients=-(-sizes.trained_bytes // world_size),
        optimizer=-(-2 * sizes.trained_bytes // world_size),  # Adam's two moments
    )
    gathered = Bytes()
    # A single process gathers nothing: its shard is the whole parameter.
    if world_size > 1 or offloads:
        layer_bytes = compute_bytes * sizes.largest_layer
        # Gradients are whole until they are reduced, from a copy in float32.
        layer_moment = (_GATHERED_LAYERS + 1) * layer_bytes + _REDUCED_BYTES * sizes.largest_layer
        root_moment = (compute_bytes + _REDUCED_BYTES) * sizes.root
        moment = max(layer_moment, root_moment)
        gathered = Bytes(buckets=compute_bytes * sizes.root, in_backward=moment)
    return torch_estimate(
        shape,
        strategy="FSDP, parameters and optimizer on cpu" if offloads else "FSDP",
        states=gathered if offloads else shards + gathered,
        host=shards * num_processes if offloads else Bytes(),
        **inputs,
    )
