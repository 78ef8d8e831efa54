"""One model on one machine: what a run of it needs, with what was measured kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.memory.estimate import Bytes, MemoryEstimate, MemoryNeed, bars_of, replicated
from nbaccel.memory.model_size import Shape, measure
from nbaccel.memory.model_states import (
    ShortFormats,
    WrappedSizes,
    fsdp_estimate,
    model_states,
    short_formats,
    wrapped_sizes,
)
from nbaccel.memory.settings_form import SettingsForm
from nbaccel.plan import Gpu, Inventory, Plan, registry

FSDP = "fsdp"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """Bytes that may be used: on each device, of the host, of the disk; None: what is free."""

    device: int | None = None
    host: int | None = None
    nvme: int | None = None

    def of(self, machine: Inventory, num_processes: int) -> Inventory:
        """The machine with no more than that, and with devices where some are asked for."""
        # A size of 0 would stand for one that is not known.
        if self.device is not None:
            units = machine.gpus or tuple(
                Gpu(index=number, name="device") for number in range(num_processes)
            )
            gpus = [
                replace(one, total_bytes=self.device or 1, free_bytes=self.device) for one in units
            ]
            machine = replace(machine, gpus=tuple(gpus))
        if self.host is not None:
            machine = replace(
                machine, host_total_bytes=self.host or 1, host_available_bytes=self.host
            )
        return machine


@dataclass(kw_only=True)
class MemoryModel:
    """Measures runs of one model."""

    model: Any
    sample_batch: Any
    inventory: Inventory
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    num_nodes: int | None = None
    """None: as many as the run says."""
    _activations: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    _states: dict[tuple[int, ShortFormats | None], Bytes] = field(default_factory=dict)
    _wrapped: dict[str, WrappedSizes] = field(default_factory=dict)

    @cached_property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return measure(self.model)

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
            estimate = form.estimate(self.shape, document, **inputs)
        elif plan.strategy == FSDP:
            estimate = self._sharded(config, plan, inputs)
        else:
            formats = short_formats(config, plan.device)
            world_size = plan.num_processes * inputs["num_nodes"]
            estimate = replicated(
                self.shape,
                states=self._states_at(world_size, formats),
                level="" if formats is None else formats.level,
                **inputs,
            )
        if self.limits.nvme is not None:
            estimate = replace(estimate, nvme_free=self.limits.nvme)
        return MemoryNeed(estimate=estimate, bars=bars_of(estimate, machine))

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
            # In proportion: what does not grow with the batch is counted too often then, and a
            # measurement of a large model takes a second.
            own_bytes = self.activation_bytes(config, own_samples)
            return -(-own_bytes * samples // max(1, own_samples))
        if key not in self._activations:
            self._activations[key] = measure_activations(
                self.model,
                resized(self.sample_batch, samples),
                precision=precision,
                gradient_checkpointing=config.activation_checkpointing,
            ).peak
        return self._activations[key]
