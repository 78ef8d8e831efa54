"""The ways to train a model here, each with its memory and the time of a step.

Every way is a run of its own: the chosen settings with another strategy. Of a strategy's variants
(activations computed again, less gathered at once) the first that fits is taken, so that a way that
fits at all is shown as fitting.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nbaccel.base.errors import ConfigError, InternalError, NbaccelError
from nbaccel.base.units import format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.memory.settings_form import TrainingWay
from nbaccel.memory.step_time import SHORTEST_S, StepTime, StepWork, Traffic, estimate_step
from nbaccel.notebook.picker.choices import settings_forms
from nbaccel.notebook.picker.memory_model import MemoryBar, MemoryModel, MemoryNeed
from nbaccel.notebook.picker.verdicts import lacking_text
from nbaccel.plan import Plan, registry, resolve
from nbaccel.strategies import gradient_checkpointing

__all__ = [
    "Candidate",
    "CandidateFinder",
    "beside",
    "is_as_fast",
    "judged",
    "way_of",
]

_FSDP = "fsdp"
_BEING_ESTIMATED = "being estimated …"
_SAME_SPEED = 1.05
"""Estimates that differ by less say nothing: the simpler way is the better one then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train.

    Attributes:
        name: As people call it: ``ZeRO-2, optimizer on the CPU``.
        config: The settings that it means.
        need: Its memory; None where it cannot be estimated.
        refusal: Why it cannot be taken here: a clause; empty where it can.
        step_s: Estimated seconds of one optimizer step; None where the speed is not known.
        step_words: What that is made of, in a clause.
        is_taken: Whether it is what is chosen now.
        is_best: Whether it is the fastest that fits.
        reason: Why it is the best, or what it costs beside the best: a clause.
        is_estimated: Whether all that may make it fit has been looked at; otherwise its memory is
            that of its first variant.
    """

    name: str
    config: RunConfig
    need: MemoryNeed | None = None
    refusal: str = ""
    step_s: float | None = None
    step_words: str = ""
    is_taken: bool = False
    is_best: bool = False
    reason: str = ""
    is_estimated: bool = True

    @property
    def precision(self) -> str:
        """The precision that it is in: ``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self.config.mixed_precision

    @property
    def fits(self) -> bool | None:
        """Whether the machine has the memory; None where nothing is known."""
        return None if self.need is None or not self.is_estimated else not self.need.lacking

    @property
    def can_be_taken(self) -> bool:
        """Whether it fits, and nothing speaks against it."""
        return bool(self.fits) and not self.refusal

    @property
    def spare(self) -> int:
        """Bytes that stay free where it is tightest; negative: the bytes that are missing."""
        if self.need is None:
            return 0
        if self.need.lacking:
            return -max(memory_bar.lacking for memory_bar in self.need.bars)
        bars = [memory_bar for memory_bar in self.need.bars if memory_bar.needed]
        return min(map(_free_after, bars), default=0)

    @property
    def verdict(self) -> str:
        """Whether it fits, in a few words: ``3.3 GiB free``."""
        if not self.is_estimated:
            return _BEING_ESTIMATED
        if self.need is None:
            return "not known"
        if not self.need.lacking:
            return f"{format_bytes(self.spare)} free"
        return lacking_text(self.need)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunFigures:
    """The memory and time of a run, or why it cannot be run."""

    need: MemoryNeed | None = None
    step_time: StepTime | None = None
    refusal: str = ""


_FiguresKey: TypeAlias = "tuple[RunConfig, Traffic, int | None, int | None]"
_MOST_KEPT = 2000  # a strip has about a hundred, in all precisions


def _free_after(bar: MemoryBar) -> int:
    return sum(segment.bytes for segment in bar.segments if segment.kind == "free")


def way_of(config: RunConfig, *, world_size: int) -> str:
    """The name of the way to train that a run takes."""
    for settings_form in settings_forms():
        if settings_form.is_chosen(config):
            return settings_form.way_of(config)
    if config.strategy == _FSDP:
        return _SHARDED_ON_HOST if (config.fsdp or {}).get("cpu_offload") else _SHARDED_NAME
    return _copies_name(world_size)


_SHARDED_NAME = "FSDP"
_SHARDED_ON_HOST = "FSDP, all on the CPU"


def _copies_name(world_size: int) -> str:
    return "one copy each (DDP)" if world_size > 1 else "one process"


@dataclass
class CandidateFinder:
    """Finds the ways to train one model.

    Attributes:
        defers_recomputing: Whether a way that does not fit as it is stays unfinished where
            activations that are computed again would have to be measured first.
    """

    memory_model: MemoryModel
    defers_recomputing: bool = False
    _evaluated: dict[_FiguresKey, _RunFigures] = field(default_factory=dict)

    @functools.cached_property
    def can_checkpoint(self) -> bool:
        """Whether the model can turn activation checkpointing on, and has not done so."""
        model = self.memory_model.model
        return gradient_checkpointing.can_checkpoint_gradients(
            model
        ) and not gradient_checkpointing.checkpoints_gradients(model)

    def find(
        self, config: RunConfig, *, samples: int | None = None, passes: int | None = None
    ) -> tuple[Candidate, ...]:
        """All ways to train, the simplest first."""
        candidates = self.candidates(config, samples=samples, passes=passes)
        return tuple(judged(candidates, simplest_first=candidates))

    def candidates(
        self,
        config: RunConfig,
        *,
        samples: int | None = None,
        passes: int | None = None,
        is_chosen: bool = True,
    ) -> list[Candidate]:
        """The same, before one of them is found to be the best."""
        plan = resolve(config, self.memory_model.inventory)
        taken_name = way_of(config, world_size=plan.world_size) if is_chosen else None
        return [
            self._candidate(way, config, taken_name, samples, passes)
            for way in self._ways(config, plan)
        ]

    # ------------------------------------------------------------------- the ways

    def _ways(self, config: RunConfig, plan: Plan) -> Iterator[TrainingWay]:
        plain_config = config.changed(strategy="auto", zero_stage=None, deepspeed=None, fsdp=None)
        on_host = device_row(plan.device).in_host_memory
        yield TrainingWay(
            name=_copies_name(plan.world_size),
            configs=self._recomputing(plain_config),
            traffic=Traffic(),
        )
        sharded_config = config.changed(
            strategy=_FSDP, zero_stage=None, deepspeed=None, fsdp=_fsdp_settings(config, False)
        )
        refusal = "" if plan.world_size > 1 else "needs two processes or more"
        yield TrainingWay(
            name=_SHARDED_NAME,
            configs=self._recomputing(sharded_config),
            traffic=Traffic(shards_parameters=True),
            refusal=refusal,
        )
        if not on_host:
            yield TrainingWay(
                name=_SHARDED_ON_HOST,
                configs=self._recomputing(
                    sharded_config.changed(fsdp=_fsdp_settings(config, True))
                ),
                traffic=Traffic(
                    shards_parameters=True, optimizer_place="cpu", parameter_place="cpu"
                ),
                refusal=refusal,
            )
        for settings_form in settings_forms():
            yield from settings_form.ways(
                config,
                self.memory_model.shape,
                on_host=on_host,
                can_checkpoint=self.can_checkpoint,
            )

    def _recomputing(self, config: RunConfig) -> Iterator[RunConfig]:
        yield config
        if not config.activation_checkpointing and self.can_checkpoint:
            yield config.changed(activation_checkpointing=True)

    # ------------------------------------------------------------------- one way

    def _candidate(
        self,
        way: TrainingWay,
        config: RunConfig,
        taken_name: str | None,
        samples: int | None,
        passes: int | None,
    ) -> Candidate:
        if is_taken := way.name == taken_name:
            # What was changed since by hand is what is shown.
            way = replace(way, configs=(config,), refusal="")
        candidate = None
        for variant_config in way.configs:
            if candidate is not None and self._is_deferred(variant_config) and not way.refusal:
                candidate = replace(candidate, is_estimated=False)
                break
            figures = self._evaluate(variant_config, way.traffic, samples, passes)
            if figures.need is None:
                kept = candidate or Candidate(name=way.name, config=variant_config)
                candidate = replace(kept, refusal=way.refusal or figures.refusal)
                continue
            step_time = figures.step_time
            candidate = Candidate(
                name=way.name,
                config=variant_config,
                need=figures.need,
                refusal=way.refusal,
                step_s=None if step_time is None else step_time.total,
                step_words="" if step_time is None else step_time.words,
            )
            if not figures.need.lacking or way.refusal:
                break
        if candidate is None:
            raise InternalError(f"The way to train {way.name!r} has no settings.")
        return replace(candidate, is_taken=is_taken)

    def _is_deferred(self, config: RunConfig) -> bool:
        return (
            self.defers_recomputing
            and config.activation_checkpointing
            and not self.memory_model.has_measured(config)
        )

    def _evaluate(
        self, config: RunConfig, traffic: Traffic, samples: int | None, passes: int | None
    ) -> _RunFigures:
        """What a run needs and takes: found once, as most of a strip is the same after a choice."""
        figures_key = (config, traffic, samples, passes)
        if figures_key in self._evaluated:
            return self._evaluated[figures_key]
        try:
            plan = resolve(config, self.memory_model.inventory)
            need = self._need(config, plan, samples)
        except NbaccelError as error:
            figures = _RunFigures(refusal=_first_mistake(error))
        else:
            figures = _RunFigures(
                need=need, step_time=self._step_time(config, plan, traffic, samples, passes)
            )
            if need.estimate.nvme.total:
                return figures  # what is free on a disk changes while one looks
        if len(self._evaluated) >= _MOST_KEPT:
            self._evaluated.clear()
        self._evaluated[figures_key] = figures
        return figures

    def _need(self, config: RunConfig, plan: Plan, samples: int | None) -> MemoryNeed:
        model = self.memory_model
        chosen_form = next(
            (form for form in settings_forms() if form.is_chosen(config)),
            None,
        )
        document = None
        if chosen_form is not None:
            document = chosen_form.filled_in(config, plan, model.model, model.sample_batch).config
        return model.need(config, plan, chosen_form, document or {}, samples=samples)

    def _step_time(
        self,
        config: RunConfig,
        plan: Plan,
        traffic: Traffic,
        samples: int | None,
        passes: int | None,
    ) -> StepTime | None:
        memory_model = self.memory_model
        per_sample = memory_model.operations_per_sample()
        if per_sample is None:
            return None
        shape = memory_model.shape
        work = StepWork(
            forward_flops=per_sample * (samples or memory_model.num_samples or 1),
            recomputes=config.activation_checkpointing,
            passes=passes or config.gradient_accumulation_steps or 1,
            trained=shape.trainable,
            total=shape.total,
            value_bytes=4 if config.mixed_precision == "no" else 2,
            precision=config.mixed_precision,
        )
        on_host = device_row(plan.device).in_host_memory
        device_units = registry.device(plan.device).units(memory_model.inventory)
        if not (on_host or device_units):
            return None
        machine = replace(memory_model.inventory, gpus=() if on_host else device_units)
        return estimate_step(
            work,
            traffic,
            machine,
            num_processes=plan.num_processes,
            num_nodes=config.num_nodes,
        )


def _fsdp_settings(config: RunConfig, offloads: bool) -> dict[str, Any] | None:
    settings: dict[str, Any] = {
        key: value for key, value in (config.fsdp or {}).items() if key != "cpu_offload"
    }
    if offloads:
        settings["cpu_offload"] = True
    return settings or None


def _first_mistake(error: NbaccelError) -> str:
    """What is wrong, in a clause, without what to do about it."""
    text = error.mistakes[0] if isinstance(error, ConfigError) else str(error)
    return text.partition(". ")[0].rstrip(".")


# ----------------------------------------------------------------------- which is best


def judged(
    candidates: Sequence[Candidate], *, simplest_first: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Mark the best, and tell what the others cost beside it."""
    if not all(candidate.is_estimated for candidate in candidates):
        yield from candidates  # one of those that are missing may be better than all others
        return
    best = _best_of(simplest_first)
    for candidate in candidates:
        if candidate is best:
            yield replace(candidate, is_best=True, reason=_best_reason(candidate, candidates))
        else:
            yield replace(candidate, reason=beside(candidate, best))


def _best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    fitting = [candidate for candidate in candidates if candidate.can_be_taken]
    times = [candidate.step_s for candidate in fitting if candidate.step_s is not None]
    if not times:
        return fitting[0] if fitting else None
    fastest_s = min(times)
    return next(
        candidate
        for candidate in fitting
        if candidate.step_s is not None and is_as_fast(candidate.step_s, fastest_s)
    )


def is_as_fast(step_s: float, other_s: float) -> bool:
    """Whether estimates do not tell two steps apart, or the first is the faster one."""
    return step_s <= max(other_s * _SAME_SPEED, SHORTEST_S)


def _best_reason(best: Candidate, candidates: Sequence[Candidate]) -> str:
    others = [candidate for candidate in candidates if candidate.can_be_taken]
    room_words = f"fits with {format_bytes(best.spare)} to spare"
    recompute_words = (
        "; activations are computed again" if best.config.activation_checkpointing else ""
    )
    if len(others) == 1:
        return f"{room_words}; nothing else does{recompute_words}"
    if best.step_s is None:
        return f"{room_words}; the simplest that does{recompute_words}"
    is_alone = not any(
        other is not best and other.step_s is not None and is_as_fast(other.step_s, best.step_s)
        for other in others
    )
    speed_words = (
        "the fastest that does" if is_alone else "no other is faster, and it is the simplest"
    )
    return f"{room_words}; {speed_words}{recompute_words}"


def beside(candidate: Candidate, best: Candidate | None) -> str:
    """What a way costs beside the best: a clause; empty where nothing is known."""
    if candidate.refusal:
        return candidate.refusal
    if not candidate.fits:
        return candidate.verdict
    if best is None or best.step_s is None or candidate.step_s is None:
        return ""
    more_free = candidate.spare - best.spare
    words = f", {format_bytes(more_free)} more free" if more_free > 0 else ""
    if candidate.config.activation_checkpointing and not best.config.activation_checkpointing:
        words += "; activations are computed again"
    if is_as_fast(candidate.step_s, best.step_s):
        return f"as fast{words}"
    times_longer = candidate.step_s / best.step_s
    return f"a step takes {times_longer:.1f} times as long{words}"
