"""The ways to train a model here: what each needs, whether it fits, and which is the best.

Every way is a run of its own: the chosen settings with another strategy. Of a way's variants
(activations computed again, less gathered at once) the first that fits is taken, so that a way that
fits at all is shown as fitting.

The best is the first that fits in the order of transformers' DeepSpeed guide (docs/source/en/
deepspeed.md, "Select a ZeRO stage"), which DeepSpeed's own documentation links to. No time of a
step is estimated: it depends on what joins the devices, and on kernels, as much as on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nbaccel.base.errors import ConfigError, InternalError, NbaccelError
from nbaccel.base.units import format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, precision_row
from nbaccel.memory.memory_bars import MemoryNeed
from nbaccel.memory.memory_model import FSDP, MemoryModel
from nbaccel.memory.precision_choice import best_precision
from nbaccel.memory.settings_form import SettingsForm, StatePlacement, TrainingWay, settings_forms
from nbaccel.plan import Plan, resolve
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
    document: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own configuration."""
    need: MemoryNeed | None = None
    """None where it cannot be estimated."""
    refusal: str = ""
    """Why it cannot be taken here: a clause."""
    recomputes: bool = False
    """Whether it computes activations again, which was not asked for."""
    is_taken: bool = False
    is_best: bool = False
    """Of those that fit."""
    reason: str = ""
    """Why it is the best, or what it costs beside the best: a clause."""

    @property
    def precision(self) -> str:
        """The precision that it is in: ``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self.config.mixed_precision

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
    form = _form_of(config)
    if form is not None:
        return form.way_of(config)
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
        return self._judged(self.candidates(config, samples=samples), config)

    def compare(self, config: RunConfig, precisions: Sequence[str]) -> tuple[Candidate, ...]:
        """The same of several precisions: of each way, one for each of them."""
        found: dict[str, dict[str, Candidate]] = {}
        for precision in precisions:
            try:
                candidates = self.candidates(
                    config.changed(mixed_precision=precision),
                    is_chosen=precision == config.mixed_precision,
                )
            except NbaccelError:
                # Its own settings speak against it, a section of a DeepSpeed configuration for
                # example. The button of the precision says so.
                continue
            for candidate in candidates:
                found.setdefault(candidate.name, {})[precision] = candidate
        compared = [one for of_way in found.values() for one in _told_once(of_way)]
        return self._judged(compared, config)

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

    # ------------------------------------------------------------------- the ways

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
                config,
                self.memory_model.shape,
                on_host=on_host,
                can_checkpoint=self.can_checkpoint,
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
            recomputes = variant.activation_checkpointing and not config.activation_checkpointing
            found.append(
                replace(
                    candidate,
                    name=way.name,
                    placement=way.placement,
                    refusal=way.refusal or candidate.refusal,
                    recomputes=recomputes,
                )
            )
            if candidate.need is not None and (candidate.fits or way.refusal):
                return found[-1]
        if not found:
            raise InternalError(f"The way to train {way.name!r} has no settings.")
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

    # ------------------------------------------------------------------- which is best

    def _judged(self, candidates: Sequence[Candidate], config: RunConfig) -> tuple[Candidate, ...]:
        """Mark the best, and tell what the others cost beside it."""
        machine = self.memory_model.inventory
        precision, _ = best_precision(resolve(config, machine), machine)
        # Then what needs no care; formats of 8 bits come last.
        order = (precision, "bf16", "no", "fp16")
        by_precision = {name: place for place, name in reversed([*enumerate(order)])}
        fitting = [candidate for candidate in candidates if candidate.can_be_taken]
        best = min(
            fitting,
            key=lambda one: (by_precision.get(one.precision, len(order)), rank_of(one)),
            default=None,
        )
        return tuple(
            replace(one, is_best=True, reason=_best_reason(one, len(fitting)))
            if one is best
            else replace(one, reason=beside(one, best))
            for one in candidates
        )


def _told_once(of_way: Mapping[str, Candidate]) -> Iterable[Candidate]:
    """All of one way, or the first of them where each is refused for the same reason."""
    candidates = list(of_way.values())
    refusals = {candidate.refusal for candidate in candidates}
    return candidates[:1] if len(refusals) == 1 and "" not in refusals else candidates


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
    if precision_row(best.precision).has_backends:
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
    is_same = candidate.name == best.name  # in another precision
    words = _cost_of(candidate.placement) or f"no faster{'' if is_same else ', and less simple'}"
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
