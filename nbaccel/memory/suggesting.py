"""What a colleague would propose: processes, precision, way to train, batch and accumulation.

Proposals are the best of the ways to train, with the batch halved until one fits. Where the best
one is tight, a second one leaves more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.memory.precision_choice import best_precision
from nbaccel.memory.settings_form import settings_forms
from nbaccel.memory.ways import Candidate, CandidateFinder, beside, rank_of
from nbaccel.plan import resolve

_TIGHT_SHARE = 0.15
"""Of a device's memory: with less than that left free, an estimate may be wrong enough to fail."""
_MAX_NOT_CHOSEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings to take, as a colleague would explain them: a clause for each reason."""

    title: str
    """``2 processes, bf16, ZeRO-2, batch 8 each``"""
    config: RunConfig
    candidate: Candidate
    why: tuple[str, ...]
    not_chosen: tuple[str, ...]
    batch_size: int | None
    accumulation: int

    @property
    def advice(self) -> tuple[str, ...]:
        """What the settings cannot do by themselves."""
        advice = [form.missing_library for form in settings_forms() if form.is_chosen(self.config)]
        if self.batch_size is not None and self.accumulation > 1:
            advice.append(
                f"Give your data loader batch_size={self.batch_size}: "
                f"{self.accumulation} of them make a step."
            )
        return tuple(filter(None, advice))


def halvings(batch_size: int, accumulation: int) -> Iterator[tuple[int, int]]:
    """Smaller and smaller batches that make the same optimizer step."""
    yield batch_size, accumulation
    while batch_size > 1 and batch_size % 2 == 0:
        batch_size = batch_size // 2
        accumulation = accumulation * 2
        yield batch_size, accumulation


def proposals(finder: CandidateFinder, config: RunConfig) -> tuple[Proposal, ...]:
    """Settings to take, the best first."""
    config, why = _begun(finder, config)
    batch = finder.memory_model.num_samples
    accumulation = config.gradient_accumulation_steps or 1
    # Without a batch there are no activations, and nothing to halve.
    rounds = [(None, accumulation)] if batch is None else [*halvings(batch, accumulation)]
    lacking = 0
    for samples, passes in rounds:
        in_round = config
        if passes != accumulation:
            in_round = config.changed(gradient_accumulation_steps=passes)
        candidates = finder.find(in_round, samples=samples)
        best = next((candidate for candidate in candidates if candidate.is_best), None)
        if best is not None:
            if passes != accumulation:
                why = (*why, f"batches of {samples}: larger ones do not fit")
            not_chosen = [
                f"{one.name}: {one.reason}" for one in candidates if one.reason and one is not best
            ]
            first = _proposal(best, why, not_chosen[:_MAX_NOT_CHOSEN], samples, finder)
            leaner = _leaner(finder, in_round, best, samples)
            others = [] if leaner is None else [_proposal(leaner, why, [], samples, finder)]
            return (first, *others)
        lacking = min(-one.spare for one in candidates if one.need is not None)
    smaller = "" if batch is None else ", even one sample at a time"
    raise ConfigError(
        f"Nothing fits{smaller}: the leanest way needs {format_bytes(lacking)} more than is free. "
        f"Training would run out of memory with {config}. Use more devices, a smaller model, or "
        "free memory that others use."
    )


def remedy(finder: CandidateFinder, config: RunConfig) -> str:
    """What to do where the chosen settings do not fit."""
    candidates = finder.find(config)
    best = next((found for found in candidates if found.is_best), None)
    if best is not None:
        return f"{best.name} would fit."
    if finder.memory_model.sample_batch is not None:
        return "Nothing fits with this batch: press Suggest, which tries smaller ones."
    return "Nothing fits: take more devices, or a smaller model."


def _begun(finder: CandidateFinder, config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Processes and precision, which are decided before a way to train is looked for."""
    machine = finder.memory_model.inventory
    plan = resolve(config, machine)
    why = []
    if config.num_processes is None and device_row(plan.device).in_host_memory:
        count = _fitting_copies(finder, config, machine.cpu_cores)
        config = config.changed(num_processes=count)
        reason = ", one per core"
        if count < machine.cpu_cores:
            reason = ": host memory has no room for one per core"
        why.append(f"{count_noun(count, 'process')}{reason}")
    elif config.num_processes is None:
        noun = device_row(plan.device).noun
        why.append(f"{count_noun(plan.num_processes, 'process')}, one per {noun}")
    precision, reason = best_precision(plan, machine)
    if config.mixed_precision == "no" != precision:
        try:
            changed_config = config.changed(mixed_precision=precision)
            resolve(changed_config, machine)
        except NbaccelError:  # its own settings, or those of the device, speak against it
            return config, tuple(why)
        return changed_config, (*why, f"{precision}: {reason}")
    return config, tuple(why)


def _fitting_copies(finder: CandidateFinder, config: RunConfig, cores: int) -> int:
    """One process per core, or as many as host memory has room for a copy each."""
    count = cores
    while count >= 1:
        copies = finder.find(config.changed(num_processes=count))[0]
        if copies.can_be_taken:
            return count
        count //= 2
    # Not even one copy: then the model is divided among all of them.
    return cores


def _leaner(
    finder: CandidateFinder, config: RunConfig, best: Candidate, samples: int | None
) -> Candidate | None:
    """The fastest way that leaves enough free, where the best does not."""
    if not _is_tight(best):
        return None
    if finder.can_checkpoint:
        config = config.changed(activation_checkpointing=True)
    roomy = [
        candidate
        for candidate in finder.find(config, samples=samples)
        if candidate.can_be_taken and not _is_tight(candidate)
    ]
    leaner = min(roomy, key=rank_of, default=None)
    return None if leaner is None else replace(leaner, reason=beside(leaner, best))


def _is_tight(candidate: Candidate) -> bool:
    bars = () if candidate.need is None else candidate.need.bars
    capacity = min((bar.capacity for bar in bars if bar.needed and bar.capacity), default=0)
    return candidate.spare < _TIGHT_SHARE * capacity


def _proposal(
    candidate: Candidate,
    why: tuple[str, ...],
    not_chosen: list[str],
    batch_size: int | None,
    finder: CandidateFinder,
) -> Proposal:
    config = candidate.config
    plan = resolve(config, finder.memory_model.inventory)
    accumulation = config.gradient_accumulation_steps or 1
    precision = "fp32" if config.mixed_precision == "no" else config.mixed_precision
    parts = [count_noun(plan.num_processes, "process"), precision, candidate.name]
    if config.activation_checkpointing:
        parts.append("activation checkpointing")
    if batch_size is not None:
        accumulated = f", {accumulation} accumulated" if accumulation > 1 else ""
        parts.append(f"batch {batch_size} each{accumulated}")
    return Proposal(
        title=", ".join(parts),
        config=config,
        candidate=candidate,
        why=(*why, *filter(None, [candidate.reason])),
        not_chosen=tuple(not_chosen),
        batch_size=batch_size,
        accumulation=accumulation,
    )
