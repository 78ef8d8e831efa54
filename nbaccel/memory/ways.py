"""The ways to train a model here: what each needs, whether it fits, and which is the best.

Of a way's variants the first that fits is taken. The best is the first that fits in the order of
transformers' DeepSpeed guide ("Select a ZeRO stage"): no time of a step is estimated. Proposals are
the best of the ways, with the batch halved until one fits, and one that leaves more memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, precision_row
from nbaccel.memory.estimate import MemoryNeed
from nbaccel.memory.memory_model import FSDP, MemoryModel
from nbaccel.memory.settings_form import SettingsForm, StatePlacement, TrainingWay, settings_forms
from nbaccel.plan import Inventory, Plan, registry, resolve
from nbaccel.strategies.model_blocks import can_checkpoint_gradients, checkpoints_gradients

FASTEST_FIRST = (
    StatePlacement(0),
    StatePlacement(1),
    StatePlacement(2),
    StatePlacement(2, "cpu"),
    StatePlacement(3),
    StatePlacement(3, "cpu"),
    StatePlacement(3, "none", "cpu"),
    StatePlacement(3, "cpu", "cpu"),
    StatePlacement(3, "nvme", "cpu"),
    StatePlacement(3, "nvme", "nvme"),
)
"""Within a placement, a variant that computes activations again comes after one that does not."""
_MOST_KEPT = 2000  # a strip has about a hundred, in all precisions
_SHARDED_NAME = "FSDP"
_SHARDED_ON_HOST = "FSDP, all on the CPU"
_CAUTION = "see that the loss falls as in bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train, judged beside the others."""

    name: str
    config: RunConfig
    placement: StatePlacement = field(default_factory=StatePlacement)
    document: Mapping[str, Any] = field(default_factory=dict)  # the strategy's own configuration
    need: MemoryNeed | None = None  # None where it cannot be estimated
    refusal: str = ""  # why it cannot be taken here: a clause
    recomputes: bool = False  # whether it computes activations again, which was not asked for
    is_taken: bool = False
    is_best: bool = False  # of those that fit
    reason: str = ""  # why it is the best, or what it costs beside the best: a clause

    @property
    def fits(self) -> bool | None:
        """Whether the machine has the memory; None where nothing is known."""
        return None if self.need is None else not self.need.lacking

    @property
    def can_be_taken(self) -> bool:
        """Whether it fits, and nothing speaks against it."""
        return bool(self.fits) and not self.refusal

    @property
    def spare(self) -> int:
        """Bytes that stay free where it is tightest; negative: the bytes that are missing."""
        return 0 if self.need is None else self.need.spare

    @property
    def verdict(self) -> str:
        """Whether it fits, in a few words: ``3.3 GiB free``."""
        if self.need is None:
            return "not known"
        return self.need.lacking_text or f"{format_bytes(self.spare)} free"


def way_of(config: RunConfig, *, world_size: int) -> str:
    """The name of the way to train that a run takes."""
    if (form := _form_of(config)) is not None:
        return str(form.way_of(config))
    if config.strategy == FSDP:
        return _SHARDED_ON_HOST if (config.fsdp or {}).get("cpu_offload") else _SHARDED_NAME
    return _copies_name(world_size)


def _copies_name(world_size: int) -> str:
    return "one copy each (DDP)" if world_size > 1 else "one process"


def _form_of(config: RunConfig) -> SettingsForm | None:
    return next((form for form in settings_forms() if form.is_chosen(config)), None)


@dataclass
class CandidateFinder:
    """Finds the ways to train one model."""

    memory_model: MemoryModel
    _evaluated: dict[tuple[RunConfig, int | None], Candidate] = field(default_factory=dict)

    @cached_property
    def can_checkpoint(self) -> bool:
        """Whether the model can turn activation checkpointing on, and has not done so."""
        model = self.memory_model.model
        return can_checkpoint_gradients(model) and not checkpoints_gradients(model)

    def find(self, config: RunConfig, *, samples: int | None = None) -> tuple[Candidate, ...]:
        """All ways to train, judged beside each other, in the order in which they are shown."""
        candidates = self.candidates(config, samples=samples)
        fitting = [candidate for candidate in candidates if candidate.can_be_taken]
        best = min(fitting, key=rank_of, default=None)
        return tuple(
            replace(one, is_best=True, reason=_best_reason(one, len(fitting)))
            if one is best
            else replace(one, reason=beside(one, best))
            for one in candidates
        )

    def candidates(
        self, config: RunConfig, *, samples: int | None = None, is_chosen: bool = True
    ) -> list[Candidate]:
        """All ways, before one of them is found to be the best."""
        plan = resolve(config, self.memory_model.inventory)
        taken_name = way_of(config, world_size=plan.world_size) if is_chosen else None
        candidates = []
        for way in self.ways(config, plan):
            is_taken = way.name == taken_name
            # What was changed since by hand is what is shown.
            shown = replace(way, configs=(config,), refusal="") if is_taken else way
            candidates.append(replace(self._candidate(shown, config, samples), is_taken=is_taken))
        return candidates

    def ways(self, config: RunConfig, plan: Plan) -> Iterator[TrainingWay]:
        """The ways in the order in which they are shown."""
        plain = config.changed(strategy="auto", zero_stage=None, deepspeed=None, fsdp=None)
        on_host = device_row(plan.device).in_host_memory
        name = _copies_name(plan.world_size)
        yield TrainingWay(name=name, configs=self._variants(plain), placement=StatePlacement())
        alone = "" if plan.world_size > 1 else "needs two processes or more"
        settings = {key: one for key, one in (config.fsdp or {}).items() if key != "cpu_offload"}
        sharded = plain.changed(strategy=FSDP, fsdp=settings or None)
        yield TrainingWay(
            name=_SHARDED_NAME,
            configs=self._variants(sharded),
            placement=StatePlacement(3),
            refusal=alone,
        )
        if not on_host:
            yield TrainingWay(
                name=_SHARDED_ON_HOST,
                configs=self._variants(sharded.changed(fsdp={**settings, "cpu_offload": True})),
                placement=StatePlacement(3, "cpu", "cpu"),
                refusal=alone,
            )
        for form in settings_forms():
            for way in form.ways(
                config, self.memory_model.shape, on_host=on_host, can_checkpoint=self.can_checkpoint
            ):
                # One process gains nothing by dividing, only by what leaves the device.
                gains = not alone or way.placement.leaves_device
                yield way if gains else replace(way, refusal=way.refusal or alone)

    def _variants(self, config: RunConfig) -> Iterator[RunConfig]:
        yield config
        if not config.activation_checkpointing and self.can_checkpoint:
            yield config.changed(activation_checkpointing=True)

    def _candidate(self, way: TrainingWay, config: RunConfig, samples: int | None) -> Candidate:
        """The first variant that fits; the first of all where none does."""
        found: list[Candidate] = []
        for variant in way.configs:
            candidate = self._evaluate(variant, samples)
            candidate = replace(
                candidate,
                name=way.name,
                placement=way.placement,
                refusal=way.refusal or candidate.refusal,
                recomputes=variant.activation_checkpointing and not config.activation_checkpointing,
            )
            if candidate.need is not None and (candidate.fits or way.refusal):
                return candidate
            found.append(candidate)
        return next((one for one in found if one.need is not None), found[-1])

    def _evaluate(self, config: RunConfig, samples: int | None) -> Candidate:
        """What a run needs: found once, as most of a strip is the same after a choice."""
        key = (config, samples)
        if key in self._evaluated:
            return self._evaluated[key]
        form = _form_of(config)
        try:
            plan = resolve(config, self.memory_model.inventory)
            document = {} if form is None else self.document_of(form, config, plan)
            need = self.memory_model.need(config, plan, form, document, samples=samples)
        except NbaccelError as error:
            candidate = Candidate(name="", config=config, refusal=self.refusal_of(error))
        else:
            candidate = Candidate(name="", config=config, document=document, need=need)
            if need.estimate.nvme.total:
                return candidate  # what is free on a disk changes while one looks
        if len(self._evaluated) >= _MOST_KEPT:
            self._evaluated.clear()
        self._evaluated[key] = candidate
        return candidate

    def document_of(self, form: SettingsForm, config: RunConfig, plan: Plan) -> Mapping[str, Any]:
        """The strategy's own configuration of a run."""
        model = self.memory_model
        return form.filled_in(config, plan, model.model, model.sample_batch).config or {}

    def refusal_of(self, error: NbaccelError) -> str:
        """What is wrong, in a clause, without what to do about it."""
        text = error.mistakes[0] if isinstance(error, ConfigError) else str(error)
        return text.partition(". ")[0].rstrip(".")


def rank_of(candidate: Candidate) -> tuple[int, bool]:
    """The place of a way among all, the fastest first."""
    placement = candidate.placement
    # The guide knows no FSDP, which fetches weights ahead, and leaves nothing to the host.
    is_fsdp = candidate.config.strategy == FSDP and not placement.leaves_device
    place = StatePlacement(2) if is_fsdp else placement
    return FASTEST_FIRST.index(place), is_fsdp


def _best_reason(best: Candidate, num_fitting: int) -> str:
    reason = f"{format_bytes(best.spare)} to spare; "
    reason += "nothing else fits" if num_fitting == 1 else "usually the fastest that fits"
    if best.config.activation_checkpointing:
        reason += "; activations are computed again"
    if precision_row(best.config.mixed_precision).has_backends:
        reason += f"; {_CAUTION}"
    return reason


def beside(candidate: Candidate, best: Candidate | None) -> str:
    """What a way costs beside the best: a clause; empty where nothing is known."""
    if candidate.refusal:
        return candidate.refusal
    if not candidate.fits:
        return candidate.verdict
    if best is None:
        return ""
    words = _cost_of(candidate.placement) or "no faster, and less simple"
    more_free = candidate.spare - best.spare
    if more_free > 0:
        words += f", {format_bytes(more_free)} more free"
    if candidate.config.activation_checkpointing and not best.config.activation_checkpointing:
        words += "; activations are computed again"
    return words


def _cost_of(placement: StatePlacement) -> str:
    """What makes a way slower: a clause; empty where nothing does."""
    if placement.uses_disk:
        return "each step waits for the disk"
    if placement.parameters != "none":
        return "weights come from the CPU in each pass"
    if placement.optimizer != "none":
        return "the optimizer steps on the CPU"
    return "weights are fetched for each pass" if placement.divided > 2 else ""


_TIGHT_SHARE = 0.15  # of a device's memory: with less left free, an estimate may be too wrong
_MAX_NOT_CHOSEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings to take, as a colleague would explain them: a clause for each reason."""

    title: str  # ``2 processes, bf16, ZeRO-2, batch 8 each``
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
            rest = [one for one in candidates if one.reason and one is not best]
            not_chosen = [f"{one.name}: {one.reason}" for one in rest[:_MAX_NOT_CHOSEN]]
            first = _proposal(best, why, not_chosen, samples, finder)
            leaner = _leaner(finder, in_round, best, samples)
            others = [] if leaner is None else [_proposal(leaner, why, [], samples, finder)]
            return (first, *others)
        lacking = min(-one.spare for one in candidates if one.need is not None)
    smaller = "" if batch is None else ", even one sample at a time"
    raise ConfigError(
        f"Nothing fits{smaller}: the leanest way needs {format_bytes(lacking)} more than is free "
        f"with {config}. Use more devices, a smaller model, or free memory."
    )


def remedy(finder: CandidateFinder, config: RunConfig) -> str:
    """What to do where the chosen settings do not fit."""
    best = next((found for found in finder.find(config) if found.is_best), None)
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
        # Its own settings, or those of the device, may speak against it.
        with contextlib.suppress(NbaccelError):
            changed_config = config.changed(mixed_precision=precision)
            resolve(changed_config, machine)
            return changed_config, (*why, f"{precision}: {reason}")
    return config, tuple(why)


def _fitting_copies(finder: CandidateFinder, config: RunConfig, cores: int) -> int:
    """One process per core, or as many as host memory has room for a copy each."""
    count = cores
    while count >= 1:
        if finder.find(config.changed(num_processes=count))[0].can_be_taken:
            return count
        count //= 2
    return cores  # not even one copy: then the model is divided among all of them


def _leaner(
    finder: CandidateFinder, config: RunConfig, best: Candidate, samples: int | None
) -> Candidate | None:
    if not _is_tight(best):
        return None
    if finder.can_checkpoint:
        config = config.changed(activation_checkpointing=True)
    found = finder.find(config, samples=samples)
    roomy = [one for one in found if one.can_be_taken and not _is_tight(one)]
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


_HALVES = ("bf16", "fp16")  # formats of 16 bits, the one that needs no scaling of gradients first
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def best_precision(plan: Plan, machine: Inventory) -> tuple[str, str]:
    """The precision for the devices of a plan, and why; ``no`` needs no reason."""
    if device_row(plan.device).in_host_memory:
        if computes_in_bf16():
            return _HALVES[0], "this processor has instructions for it"
        return "no", ""
    units = registry.device(plan.device).units(machine)[: plan.num_processes]
    if not units:
        return "no", ""
    # The oldest decides, as ranks compute in one format.
    weakest = min(units, key=lambda unit: unit.compute_capability)
    # (0, 0) stands for a kind without such a number, as TPUs are.
    widest, smallest = _HALVES
    if (0, 0) < weakest.compute_capability < precision_row(widest).imitated_below:
        return smallest, f"{weakest.name} only imitates {widest}"
    return widest, f"{weakest.name} computes in it, with the range of fp32"


@cache
def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bfloat16, as Linux tells it."""
    for line in env.read_file(Path("/proc/cpuinfo")).splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return not set(_BF16_INSTRUCTIONS).isdisjoint(words.split())
    return False
