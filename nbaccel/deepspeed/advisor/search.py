"""Walking the ladder: what each rung needs, and whether that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.deepspeed.advisor.advice import Rung
from nbaccel.deepspeed.advisor.ladder import (
    LOWERED,
    LOWERED_KEYS,
    LadderStep,
    Recipe,
    halvings,
    ladder,
)
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.zero_memory import estimate_memory
from nbaccel.memory.activations import measure_activations, resized
from nbaccel.memory.estimate import MemoryEstimate
from nbaccel.plan.inventory import Inventory
from nbaccel.strategies.gradient_checkpointing import (
    can_checkpoint_gradients,
    checkpoints_gradients,
)

__all__ = ["Budget", "Walk", "climb"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes that may be used. None takes what is free.

    Attributes:
        device: On each device.
        host: On each host.
        nvme: On the disk.
    """

    device: int | None = None
    host: int | None = None
    nvme: int | None = None

    def of(self, memory_estimate: MemoryEstimate) -> MemoryEstimate:
        """The estimate beside this budget."""
        return replace(
            memory_estimate,
            device_free=memory_estimate.device_free if self.device is None else self.device,
            host_free=memory_estimate.host_free if self.host is None else self.host,
            nvme_free=memory_estimate.nvme_free if self.nvme is None else self.nvme,
        )


@dataclass(kw_only=True, slots=True)
class Walk:
    """One walk up the ladder with one model."""

    recipe: Recipe
    sample_batch: Any
    num_processes: int
    num_nodes: int
    inventory: Inventory
    budget: Budget
    _activations: dict[tuple[int, bool], int] = field(default_factory=dict)
    _torch_adam: dict[LadderStep, bool] = field(default_factory=dict)

    def rounds(self, batch_size: int, accumulation_steps: int) -> Iterator[Iterator[Rung]]:
        """The whole ladder, then again with half the batch, and so on."""
        hopeless_steps: set[LadderStep] = set()
        for size, steps in halvings(batch_size, accumulation_steps):
            yield self._round(size, steps, hopeless_steps)
            if self.sample_batch is None:
                return  # without activations every batch needs the same

    def _round(
        self, batch_size: int, accumulation_steps: int, hopeless_steps: set[LadderStep]
    ) -> Iterator[Rung]:
        model = self.recipe.model
        has_switch = can_checkpoint_gradients(model)
        is_on = checkpoints_gradients(model)
        for ladder_step in ladder(has_switch=has_switch, is_on=is_on):
            if ladder_step in hopeless_steps:
                continue
            ladder_rung = self._judged(
                ladder_step, batch_size, accumulation_steps, has_switch=has_switch or is_on
            )
            if ladder_rung.estimate is None or self._needs_too_much(ladder_rung.estimate):
                hopeless_steps.add(ladder_step)
            yield ladder_rung

    def _needs_too_much(self, memory_estimate: MemoryEstimate) -> bool:
        # A smaller batch lowers activations and nothing else.
        device_alone = replace(
            memory_estimate, device=replace(memory_estimate.device, activations=0)
        )
        return not device_alone.fits

    def _judged(
        self, ladder_step: LadderStep, batch_size: int, accumulation_steps: int, *, has_switch: bool
    ) -> Rung:
        if ladder_step.gradient_checkpointing and not has_switch:
            model_name = type(self.recipe.model).__name__
            reason = f"{model_name} has no gradient_checkpointing_enable() to turn it on."
            return self._refused(ladder_step, batch_size, accumulation_steps, reason)
        if ladder_step.uses_nvme and self.recipe.nvme_path is None:
            return self._refused(
                ladder_step, batch_size, accumulation_steps, "No nvme_path was given to swap to."
            )
        rung_config = self.recipe.config(ladder_step, batch_size, accumulation_steps)
        try:
            rung_config = self._checked(ladder_step, rung_config)
        except ConfigError as error:
            return self._refused(
                ladder_step, batch_size, accumulation_steps, " ".join(error.mistakes)
            )
        ladder_rung = self._estimated(ladder_step, batch_size, accumulation_steps, rung_config)
        # Working on fewer elements at once costs less speed than the next rung, so it is tried
        # first.
        for at_once in LOWERED if ladder_step.stage == 3 else ():
            if ladder_rung.is_accepted:
                break
            lowered_config = self.recipe.config(
                ladder_step, batch_size, accumulation_steps, at_once=at_once
            )
            lowered_config = self._checked(ladder_step, lowered_config)
            # Where the user has set these keys there is nothing to lower.
            if lowered_config != ladder_rung.config:
                ladder_rung = self._estimated(
                    ladder_step, batch_size, accumulation_steps, lowered_config
                )
        return ladder_rung

    def _estimated(
        self,
        ladder_step: LadderStep,
        batch_size: int,
        accumulation_steps: int,
        config: dict[str, Any],
    ) -> Rung:
        memory_estimate = self.budget.of(
            estimate_memory(
                self.recipe.shape,
                config,
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
                activation_bytes=self._activation_bytes(batch_size, ladder_step),
                inventory=self.inventory,
            )
        )
        return Rung(
            step=ladder_step,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            config=config,
            estimate=memory_estimate,
            verdict="fits" if memory_estimate.fits else "does not fit",
            reason=f"{_shortage_reason(memory_estimate)}{self._lowered(config)}",
        )

    def with_batch(self, rung: Rung, batch_size: int, accumulation_steps: int) -> dict[str, Any]:
        """The configuration of a rung with another batch."""
        at_once = next(iter(self._lowered_keys(rung.config or {}).values()), None)
        return self.recipe.config(rung.step, batch_size, accumulation_steps, at_once=at_once)

    def _lowered_keys(self, config: dict[str, Any]) -> dict[str, int]:
        """The keys that were lowered, without those that the user has set."""
        zero_section = config.get("zero_optimization") or {}
        section = self.recipe.base.get("zero_optimization") or {}
        return {
            config_key: zero_section[config_key]
            for config_key in LOWERED_KEYS
            if config_key in zero_section and config_key not in section
        }

    def _lowered(self, config: dict[str, Any]) -> str:
        texts = [f"{key}={value}" for key, value in self._lowered_keys(config).items()]
        return f" With {', '.join(texts)} in place of 1e9." if texts else ""

    def _checked(self, step: LadderStep, rung_config: dict[str, Any]) -> dict[str, Any]:
        """The configuration, or one with torch's Adam, that DeepSpeed and this machine accept.

        On a GPU DeepSpeed compiles its Adam, and few notebooks have the compiler for it. Torch's
        Adam computes the same.
        """
        torch_config = _with_torch_adam(rung_config)
        if step in self._torch_adam:  # another batch would have the same result
            return (
                torch_config if torch_config is not None and self._torch_adam[step] else rung_config
            )
        world_size = self.num_processes * self.num_nodes
        self._torch_adam[step] = False
        try:
            check_config(rung_config, world_size=world_size, inventory=self.inventory)
        except ConfigError as error:
            if torch_config is None:
                raise
            try:
                check_config(torch_config, world_size=world_size, inventory=self.inventory)
            # The first error is about the user's configuration, the second about one that was
            # tried.
            except ConfigError:
                raise error from None
            self._torch_adam[step] = True
            return torch_config
        return rung_config

    def _refused(
        self, ladder_step: LadderStep, batch_size: int, accumulation_steps: int, reason: str
    ) -> Rung:
        return Rung(
            step=ladder_step,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            config=None,
            estimate=None,
            verdict="not available",
            reason=reason,
        )

    def _activation_bytes(self, batch_size: int, step: LadderStep) -> int:
        """Measured once for each size, on a copy without memory, in seconds."""
        if self.sample_batch is None:
            return 0
        key = (batch_size, step.gradient_checkpointing)
        if key not in self._activations:
            self._activations[key] = measure_activations(
                self.recipe.model,
                resized(self.sample_batch, batch_size),
                precision=self.recipe.precision,
                # A model in which it is on already is measured as it is.
                gradient_checkpointing=step.gradient_checkpointing
                and not checkpoints_gradients(self.recipe.model),
            ).peak
        return self._activations[key]


def climb(
    ladder_rounds: Iterator[Iterator[Rung]], prove_rung: Callable[[Rung], Rung] | None = None
) -> tuple[tuple[Rung, ...], Rung | None]:
    """Take the first rung that fits."""
    seen_rungs: list[Rung] = []
    for round_rungs in ladder_rounds:
        rung = None
        for ladder_rung in round_rungs:
            tried_rung = ladder_rung
            if rung is None and ladder_rung.is_accepted:
                tried_rung = ladder_rung if prove_rung is None else prove_rung(ladder_rung)
                rung = tried_rung if tried_rung.is_accepted else None
            # The round goes on after the choice, so that the table shows all rungs.
            elif rung is not None and ladder_rung.is_accepted:
                tried_rung = replace(
                    ladder_rung, reason=f"{ladder_rung.reason} It is slower than what was chosen."
                )
            seen_rungs.append(tried_rung)
        if rung is not None:
            return tuple(seen_rungs), rung
    return tuple(seen_rungs), None


def _with_torch_adam(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same with torch's Adam; None where that is not possible."""
    optimizer = config.get("optimizer") or {}
    optimizer_params = optimizer.get("params") or {}
    # An offloaded step is computed by DeepSpeed's Adam for CPUs alone.
    has_offload = "offload_optimizer" in (config.get("zero_optimization") or {})
    if optimizer.get("type", "").lower() not in ("adam", "adamw") or has_offload:
        return None
    if "torch_adam" in optimizer_params:
        return None
    return {
        **config,
        "optimizer": {**optimizer, "params": {**optimizer_params, "torch_adam": True}},
    }


def _shortage_reason(memory_estimate: MemoryEstimate) -> str:
    """The numbers that decide: what is lacking, or how much of what there is."""
    words = {"device": "on each device", "host": "of host memory", "nvme": "of disk"}
    needs_by_place = {
        "device": (memory_estimate.device.peak, memory_estimate.device_free),
        "host": (memory_estimate.host_needed, memory_estimate.host_free),
        "nvme": (memory_estimate.nvme.total, memory_estimate.nvme_free),
    }
    if lacking_bytes := memory_estimate.lacking:
        texts = [
            f"{format_bytes(needs_by_place[name][0])} {words[name]}, "
            f"{format_bytes(missing_bytes)} more than there is"
            for name, missing_bytes in lacking_bytes.items()
        ]
        return f"It needs {' and '.join(texts)}."
    texts = [
        f"{format_bytes(needed_bytes)} of {format_bytes(free_bytes)} {words[name]}"
        for name, (needed_bytes, free_bytes) in needs_by_place.items()
        if free_bytes is not None and needed_bytes
    ]
    return f"It needs {', '.join(texts)}."
