"""Walking the ladder: what each rung needs, and whether that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.deepspeed.activations import measure_activations
from nbaccel.deepspeed.advisor.advice import Rung
from nbaccel.deepspeed.advisor.configs import LOWERED, LOWERED_KEYS, Recipe
from nbaccel.deepspeed.advisor.ladder import Step, halvings, ladder
from nbaccel.deepspeed.batches import resized
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.estimate import MemoryEstimate, estimate_memory
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Inventory
from nbaccel.strategies.gradient_checkpointing import (
    can_checkpoint_gradients,
    checkpoints_gradients,
)
from nbaccel.units import format_bytes

__all__ = ["Budget", "Walk", "climb"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What may be used, in bytes. None leaves it to what is free.

    Attributes:
        device: On each device.
        host: On each host.
        nvme: On the disk.
    """

    device: int | None = None
    host: int | None = None
    nvme: int | None = None

    def of(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """The estimate beside this budget.

        Args:
            estimate: What was estimated.

        Returns:
            The same needs, compared with what may be used.
        """
        return replace(
            estimate,
            device_free=estimate.device_free if self.device is None else self.device,
            host_free=estimate.host_free if self.host is None else self.host,
            nvme_free=estimate.nvme_free if self.nvme is None else self.nvme,
        )


@dataclass(kw_only=True, slots=True)
class Walk:
    """One walk up the ladder with one model.

    Args:
        recipe: What all configurations have in common.
        sample_batch: What one process calls the model with; None leaves activations out.
        num_processes: Processes on each machine.
        num_nodes: Machines.
        inventory: The machine.
        budget: What of it may be used.
    """

    recipe: Recipe
    sample_batch: Any
    num_processes: int
    num_nodes: int
    inventory: Inventory
    budget: Budget
    _activations: dict[tuple[int, bool], int] = field(default_factory=dict)
    _torch_adam: dict[Step, bool] = field(default_factory=dict)

    def rounds(self, batch_size: int, accumulation_steps: int) -> Iterator[Iterator[Rung]]:
        """The whole ladder, then again with half the batch, and so on.

        Args:
            batch_size: Samples of a process in one forward pass, at first.
            accumulation_steps: Forward passes of one optimizer step, at first.

        Yields:
            The rungs with one batch size, the fastest first. With smaller batches those are left
            out whose model states alone do not fit: no batch is small enough for them.
        """
        hopeless: set[Step] = set()
        for size, steps in halvings(batch_size, accumulation_steps):
            yield self._round(size, steps, hopeless)
            if self.sample_batch is None:
                return  # without activations every batch needs the same

    def _round(self, size: int, steps: int, hopeless: set[Step]) -> Iterator[Rung]:
        model = self.recipe.model
        switch, on = can_checkpoint_gradients(model), checkpoints_gradients(model)
        for step in ladder(has_switch=switch, is_on=on):
            if step in hopeless:
                continue
            rung = self._judged(step, size, steps, switch=switch or on)
            if rung.estimate is None or self._needs_too_much(rung.estimate):
                hopeless.add(step)
            yield rung

    def _needs_too_much(self, estimate: MemoryEstimate) -> bool:
        alone = replace(estimate, device=replace(estimate.device, activations=0))
        return not alone.fits

    def _judged(self, step: Step, size: int, steps: int, *, switch: bool) -> Rung:
        if step.gradient_checkpointing and not switch:
            name = type(self.recipe.model).__name__
            reason = f"{name} has no gradient_checkpointing_enable() to turn it on."
            return self._refused(step, size, steps, reason)
        if step.uses_nvme and self.recipe.nvme_path is None:
            return self._refused(step, size, steps, "No nvme_path was given to swap to.")
        config = self.recipe.config(step, size, steps)
        try:
            config = self._checked(step, config)
        except ConfigError as error:
            return self._refused(step, size, steps, " ".join(error.mistakes))
        rung = self._estimated(step, size, steps, config)
        # What ZeRO-3 has at once is lowered before the next rung, which is slower, is looked at.
        for at_once in LOWERED if step.stage == 3 else ():
            if rung.is_accepted:
                break
            lowered = self.recipe.config(step, size, steps, at_once=at_once)
            lowered = self._checked(step, lowered)
            if lowered != rung.config:
                rung = self._estimated(step, size, steps, lowered)
        return rung

    def _estimated(self, step: Step, size: int, steps: int, config: dict[str, Any]) -> Rung:
        estimate = self.budget.of(
            estimate_memory(
                self.recipe.shape,
                config,
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
                activation_bytes=self._activation_bytes(size, step),
                inventory=self.inventory,
            )
        )
        return Rung(
            step=step,
            batch_size=size,
            accumulation_steps=steps,
            config=config,
            estimate=estimate,
            verdict="fits" if estimate.fits else "does not fit",
            reason=f"{_reason(estimate)}{self._lowered(config)}",
        )

    def with_batch(self, rung: Rung, size: int, steps: int) -> dict[str, Any]:
        """The configuration of a rung with another batch.

        Args:
            rung: One that can be had.
            size: Samples of a process in one forward pass.
            steps: Forward passes of one optimizer step.

        Returns:
            What ``deepspeed.initialize`` takes; what was lowered stays so.
        """
        at_once = next(iter(self._lowered_keys(rung.config or {}).values()), None)
        return self.recipe.config(rung.step, size, steps, at_once=at_once)

    def _lowered_keys(self, config: dict[str, Any]) -> dict[str, int]:
        """What was lowered that the user had left open."""
        zero = config.get("zero_optimization") or {}
        given = self.recipe.base.get("zero_optimization") or {}
        return {key: zero[key] for key in LOWERED_KEYS if key in zero and key not in given}

    def _lowered(self, config: dict[str, Any]) -> str:
        keys = [f"{key}={value}" for key, value in self._lowered_keys(config).items()]
        return f" With {', '.join(keys)} in place of 1e9." if keys else ""

    def _checked(self, step: Step, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration, or nearly the same, which DeepSpeed and this machine take.

        On a GPU DeepSpeed compiles its Adam, and few notebooks have the compiler for it. Torch's
        own computes the same.
        """
        other = _with_torch_adam(config)
        if step in self._torch_adam:  # with another batch the same would be found
            return other if other is not None and self._torch_adam[step] else config
        world = self.num_processes * self.num_nodes
        self._torch_adam[step] = False
        try:
            check_config(config, world_size=world, inventory=self.inventory)
        except ConfigError as error:
            if other is None:
                raise
            try:
                check_config(other, world_size=world, inventory=self.inventory)
            except ConfigError:
                raise error from None
            self._torch_adam[step] = True
            return other
        return config

    def _refused(self, step: Step, size: int, steps: int, reason: str) -> Rung:
        return Rung(
            step=step,
            batch_size=size,
            accumulation_steps=steps,
            config=None,
            estimate=None,
            verdict="not available",
            reason=reason,
        )

    def _activation_bytes(self, size: int, step: Step) -> int:
        """Measured once for each size: a model on no device runs in seconds."""
        if self.sample_batch is None:
            return 0
        key = (size, step.gradient_checkpointing)
        if key not in self._activations:
            self._activations[key] = measure_activations(
                self.recipe.model,
                resized(self.sample_batch, size),
                precision=self.recipe.precision,
                gradient_checkpointing=step.gradient_checkpointing
                and not checkpoints_gradients(self.recipe.model),
            ).peak
        return self._activations[key]


def climb(
    rounds: Iterator[Iterator[Rung]], prove: Callable[[Rung], Rung] | None = None
) -> tuple[tuple[Rung, ...], Rung | None]:
    """Take the first rung that fits.

    Args:
        rounds: What :meth:`Walk.rounds` yields.
        prove: Tries a rung that fits by estimate with a real step, and says what came of it.

    Returns:
        All rungs that were looked at, and the one to take; None where none fits. Those above it
        are estimated only.
    """
    seen: list[Rung] = []
    for rungs in rounds:
        chosen = None
        for rung in rungs:
            tried = rung
            if chosen is None and rung.is_accepted:
                tried = rung if prove is None else prove(rung)
                chosen = tried if tried.is_accepted else None
            elif chosen is not None and rung.is_accepted:
                tried = replace(rung, reason=f"{rung.reason} It is slower than what was chosen.")
            seen.append(tried)
        if chosen is not None:
            return tuple(seen), chosen
    return tuple(seen), None


def _with_torch_adam(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same with torch's Adam; None where that is no choice."""
    optimizer = config.get("optimizer") or {}
    params = optimizer.get("params") or {}
    offloads = "offload_optimizer" in (config.get("zero_optimization") or {})
    if optimizer.get("type", "").lower() not in ("adam", "adamw") or offloads:
        return None
    if "torch_adam" in params:
        return None
    return {**config, "optimizer": {**optimizer, "params": {**params, "torch_adam": True}}}


def _reason(estimate: MemoryEstimate) -> str:
    """The numbers that decide: what is lacking, or how much of what there is."""
    words = {"device": "on each device", "host": "of host memory", "nvme": "of disk"}
    needs = {
        "device": (estimate.device.peak, estimate.device_free),
        "host": (estimate.host_needed, estimate.host_free),
        "nvme": (estimate.nvme.total, estimate.nvme_free),
    }
    if lacking := estimate.lacking:
        told = [
            f"{format_bytes(needs[name][0])} {words[name]}, {format_bytes(size)} more than there is"
            for name, size in lacking.items()
        ]
        return f"It needs {' and '.join(told)}."
    told = [
        f"{format_bytes(need)} of {format_bytes(free)} {words[name]}"
        for name, (need, free) in needs.items()
        if free is not None and need
    ]
    return f"It needs {', '.join(told)}."
