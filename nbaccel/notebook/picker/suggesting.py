"""What a colleague would propose: processes, precision, strategy, batch and accumulation.

Proposals come from the candidates, with the batch halved until one fits. Where the fastest one is
tight, a second one leaves more memory; where much memory stays free, another takes larger batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.units import format_bytes, format_seconds
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, precision_row
from nbaccel.memory.step_time import SHORTEST_S, computes_in_bf16
from nbaccel.notebook.picker.candidates import Candidate, CandidateFinder, beside
from nbaccel.notebook.picker.choices import settings_forms
from nbaccel.notebook.picker.memory_model import MemoryModel
from nbaccel.plan import Plan, resolve

__all__ = ["Proposal", "Suggester", "refusal_of"]

_TIGHT_SHARE = 0.15
"""Of a device's memory: with less than that left free, an estimate may be wrong enough to fail."""
_MAX_LARGER_BATCH = 8
_WORTH_IT = 1.1
"""How many times faster per sample a larger batch must be."""
_MAX_NOT_CHOSEN = 5
_HALVES = ("bf16", "fp16")
"""Formats of 16 bits, the one that needs no scaling of gradients first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings to take, as a colleague would explain them.

    Attributes:
        title: The settings in a line: ``2 processes, bf16, ZeRO-2, batch 8 x 4``.
        config: The settings.
        candidate: The way to train, with its memory and time.
        why: What speaks for it, a clause each.
        not_chosen: What was not taken and why, a clause each.
        batch_size: Samples of one process in one forward pass; None without a batch.
        accumulation: Forward passes of one optimizer step.
    """

    title: str
    config: RunConfig
    candidate: Candidate
    why: tuple[str, ...]
    not_chosen: tuple[str, ...]
    batch_size: int | None
    accumulation: int

    @property
    def advice(self) -> tuple[str, ...]:
        """What the settings cannot do by themselves."""
        advice = []
        if self.batch_size is not None and self.accumulation > 1:
            advice.append(
                f"Give your data loader batch_size={self.batch_size}: "
                f"{self.accumulation} of them make a step."
            )
        advice += [
            settings_form.missing_library
            for settings_form in settings_forms()
            if settings_form.is_chosen(self.config) and settings_form.missing_library
        ]
        return tuple(advice)


def refusal_of(module: Any, plan: Plan | None) -> str:
    """Why nothing can be suggested."""
    if module is None:
        return "give the model, configure(model, sample_batch)"
    return "" if plan is not None else "this machine cannot serve what is chosen"


@dataclass(frozen=True, slots=True)
class _Start:
    """What is decided before a way to train is looked for."""

    config: RunConfig
    plan: Plan
    why: tuple[str, ...]


class Suggester:
    """Finds settings for one model."""

    def __init__(self, memory_model: MemoryModel, finder: CandidateFinder) -> None:
        self._memory_model = memory_model
        self._finder = finder

    def proposals(self, config: RunConfig) -> tuple[Proposal, ...]:
        """Settings to take, the fastest first."""
        start = self._start(config)
        batch_sizes = list(self._batches(config))
        least_lacking = 0
        for batch_size, passes in batch_sizes:
            candidates = self._finder.find(start.config, samples=batch_size, passes=passes)
            best = next((candidate for candidate in candidates if candidate.is_best), None)
            if best is not None:
                return tuple(self._around(start, best, candidates, batch_size, passes))
            least_lacking = min(
                -candidate.spare for candidate in candidates if candidate.need is not None
            )
        smaller = "" if self._memory_model.sample_batch is None else ", even one sample at a time"
        raise ConfigError(
            f"Nothing fits{smaller}: the leanest way needs {format_bytes(least_lacking)} more than "
            f"is free. Training would run out of memory with {config}. Use more devices, a smaller "
            "model, or free memory that others use."
        )

    def remedy(self, config: RunConfig) -> str:
        """What to do where the chosen settings do not fit."""
        candidates = self._finder.find(config)
        if not all(candidate.is_estimated for candidate in candidates):
            return ""
        best = next((found for found in candidates if found.is_best), None)
        if best is not None:
            return f"{best.name} would fit."
        if self._memory_model.sample_batch is not None:
            return "Nothing fits with this batch: press Suggest, which tries smaller ones."
        return "Nothing fits: take more devices, or a smaller model."

    # ------------------------------------------------------------------- what comes first

    def _start(self, config: RunConfig) -> _Start:
        machine = self._memory_model.inventory
        plan = resolve(config, machine)
        why = []
        on_host = device_row(plan.device).in_host_memory
        if config.num_processes is None:
            if on_host:
                count = self._fitting_copies(config, machine.cpu_cores)
                config = config.changed(num_processes=count)
                why.append(_processes_words(count, machine.cpu_cores))
            else:
                noun = device_row(plan.device).noun
                why.append(f"{_number_of_processes(plan.num_processes)}, one per {noun}")
        precision, reason = self._precision(config, plan)
        if precision != config.mixed_precision:
            try:
                changed_config = config.changed(mixed_precision=precision)
                resolve(changed_config, machine)
            except NbaccelError:
                precision = config.mixed_precision
            else:
                config = changed_config
                why.append(f"{precision}: {reason}")
        return _Start(config, resolve(config, machine), tuple(why))

    def _fitting_copies(self, config: RunConfig, cores: int) -> int:
        """One process per core, or as many as host memory has room for a copy each."""
        count = cores
        while count >= 1:
            copies = self._finder.find(config.changed(num_processes=count))[0]
            if copies.can_be_taken:
                return count
            count //= 2
        # Not even one copy: then the model is divided among all of them.
        return cores

    def _precision(self, config: RunConfig, plan: Plan) -> tuple[str, str]:
        """The fastest precision that needs no care; the chosen one where one was chosen."""
        if config.mixed_precision != "no":
            return config.mixed_precision, ""
        if device_row(plan.device).in_host_memory:
            # Of a device that computes in host memory one 16-bit format is not imitated.
            native = [name for name in _HALVES if name not in dict(device_row(plan.device).slow)]
            if native and computes_in_bf16():
                return native[0], "this processor has instructions for it"
            return "no", ""
        gpus = self._memory_model.inventory.gpus[: plan.num_processes]
        if not gpus:
            return "no", ""
        weakest = min(gpus, key=lambda gpu: gpu.compute_capability)
        widest, smallest = _HALVES
        if weakest.compute_capability >= precision_row(widest).imitated_below:
            return widest, f"{weakest.name} computes in it, with the range of fp32"
        return smallest, f"{weakest.name} only imitates {widest}"

    def _batches(self, config: RunConfig) -> Iterator[tuple[int | None, int]]:
        """The batch, then half of it with twice the accumulation, and so on."""
        batch_size = self._memory_model.num_samples
        passes = config.gradient_accumulation_steps or 1
        yield batch_size, passes
        while batch_size is not None and batch_size > 1 and batch_size % 2 == 0:
            batch_size = batch_size // 2
            passes = passes * 2
            yield batch_size, passes

    # ------------------------------------------------------------------- the proposals

    def _around(
        self,
        start: _Start,
        best: Candidate,
        candidates: tuple[Candidate, ...],
        batch_size: int | None,
        passes: int,
    ) -> Iterator[Proposal]:
        not_chosen = tuple(_not_chosen(candidates, best))[:_MAX_NOT_CHOSEN]
        why = (*start.why, best.reason)
        if passes > (start.config.gradient_accumulation_steps or 1):
            why = (*why, f"batches of {batch_size}: larger ones do not fit")
        yield _proposal(start, best, batch_size, passes, why, not_chosen)
        leaner = self._leaner_one(start, best, batch_size, passes)
        if leaner is not None:
            yield _proposal(start, leaner, batch_size, passes, (*start.why, leaner.reason), ())
        larger = self._larger_batch(start, best, batch_size, passes)
        if larger is not None:
            yield larger

    def _leaner_one(
        self, start: _Start, best: Candidate, batch_size: int | None, passes: int
    ) -> Candidate | None:
        """The fastest way that leaves enough free, where the best does not."""
        if not _is_tight(best):
            return None
        config = start.config
        if self._finder.can_checkpoint:
            config = config.changed(activation_checkpointing=True)
        roomy = [
            candidate
            for candidate in self._finder.find(config, samples=batch_size, passes=passes)
            if candidate.can_be_taken and not _is_tight(candidate)
        ]
        leaner = min(
            roomy,
            key=lambda candidate: float("inf") if candidate.step_s is None else candidate.step_s,
            default=None,
        )
        return None if leaner is None else replace(leaner, reason=beside(leaner, best))

    def _larger_batch(
        self, start: _Start, best: Candidate, batch_size: int | None, passes: int
    ) -> Proposal | None:
        """More samples at once, where memory has room and each sample takes less time."""
        if batch_size is None or best.step_s is None or passes > 1:
            return None
        found: Proposal | None = None
        factor = 2
        while factor <= _MAX_LARGER_BATCH:
            candidates = self._finder.find(start.config, samples=batch_size * factor, passes=passes)
            same = next((one for one in candidates if one.name == best.name), None)
            if same is None or not same.can_be_taken or same.step_s is None or _is_tight(same):
                break
            gain = best.step_s * factor / same.step_s
            if gain >= _WORTH_IT:
                why = (
                    f"{gain:.1f} times as many samples per second",
                    "the optimizer takes fewer, larger steps: the learning rate may need a change",
                )
                found = _proposal(start, same, batch_size * factor, passes, why, ())
            factor *= 2
        return found


def _proposal(
    start: _Start,
    candidate: Candidate,
    batch_size: int | None,
    passes: int,
    why: tuple[str, ...],
    not_chosen: tuple[str, ...],
) -> Proposal:
    config = candidate.config
    if passes != (config.gradient_accumulation_steps or 1):
        config = config.changed(gradient_accumulation_steps=passes)
    precision = "fp32" if config.mixed_precision == "no" else config.mixed_precision
    parts = [_number_of_processes(start.plan.num_processes), precision, candidate.name]
    if config.activation_checkpointing:
        parts.append("activation checkpointing")
    if batch_size is not None:
        accumulated = f", {passes} accumulated" if passes > 1 else ""
        parts.append(f"batch {batch_size} each{accumulated}")
    if candidate.step_s is not None and candidate.step_s >= SHORTEST_S:
        why = (*why, f"about {format_seconds(candidate.step_s)} per step: {candidate.step_words}")
    return Proposal(
        title=", ".join(parts),
        config=config,
        candidate=candidate,
        why=tuple(filter(None, why)),
        not_chosen=not_chosen,
        batch_size=batch_size,
        accumulation=passes,
    )


def _number_of_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _processes_words(count: int, cores: int) -> str:
    if count == cores:
        return f"{_number_of_processes(count)}, one per core"
    return f"{_number_of_processes(count)}: host memory has no room for one per core"


def _not_chosen(candidates: tuple[Candidate, ...], best: Candidate) -> Iterator[str]:
    for candidate in candidates:
        if candidate is not best and candidate.reason:
            yield f"{candidate.name}: {candidate.reason}"


def _is_tight(candidate: Candidate) -> bool:
    bars = () if candidate.need is None else candidate.need.bars
    capacity = min((bar.capacity for bar in bars if bar.needed and bar.capacity), default=0)
    return candidate.spare < _TIGHT_SHARE * capacity
