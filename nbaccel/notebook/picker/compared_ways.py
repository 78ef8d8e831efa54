"""The ways to train in each precision that the machine has, judged against each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.units import format_seconds
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import precision_row
from nbaccel.memory.step_time import SHORTEST_S
from nbaccel.notebook.picker.candidates import Candidate, CandidateFinder, is_as_fast, judged
from nbaccel.notebook.picker.choices import by_name, settings_forms
from nbaccel.notebook.picker.memory_model import MemoryModel

__all__ = [
    "button_names",
    "compare_precisions",
    "groups_of_ways",
    "hint_of",
    "is_shown_once",
    "name_with_precision",
    "precision_label",
]

_SETTING = "mixed_precision"
_SIMPLEST_FIRST = ("no", "bf16", "fp16")
"""Of equally fast ones the first is the better one: fp16 needs its gradients scaled, and formats
of 8 bits a library of their own."""
_CAUTION = "see that the loss falls as in bf16"


def precision_label(precision_name: str) -> str:
    """A precision as the form writes it: ``fp32`` for ``no``."""
    labels = {option.value: option.label for option in by_name()[_SETTING].options}
    return labels.get(precision_name, precision_name)


def name_with_precision(candidate: Candidate) -> str:
    """Both in a few words: ``ZeRO-2 in bf16``."""
    return f"{candidate.name} in {precision_label(candidate.precision)}"


def compare_precisions(
    finder: CandidateFinder, config: RunConfig, precision_names: Sequence[str]
) -> tuple[Candidate, ...]:
    """All ways to train in several precisions."""
    found: dict[str, dict[str, Candidate]] = {}
    for precision_name in precision_names:
        is_chosen = precision_name == config.mixed_precision
        try:
            with_precision = config.changed(mixed_precision=precision_name)
            candidates = finder.candidates(with_precision, is_chosen=is_chosen)
        except NbaccelError:
            # Its own settings speak against it, a section of a DeepSpeed configuration for
            # example. The button of the precision says so.
            continue
        for candidate in candidates:
            found.setdefault(candidate.name, {})[precision_name] = candidate
    compared = [one for by_precision in found.values() for one in _shown_once(by_precision)]
    simplest_first = sorted(compared, key=_Order(found))
    return tuple(map(_with_caution, judged(compared, simplest_first=simplest_first)))


def _with_caution(candidate: Candidate) -> Candidate:
    """The best one; what its precision asks of the training is told with it."""
    if candidate.is_best and precision_row(candidate.precision).has_backends:
        return replace(candidate, reason=f"{candidate.reason}; {_CAUTION}")
    return candidate


def hint_of(candidates: Sequence[Candidate], compared: Sequence[Candidate]) -> str:
    """What another precision would do better."""
    best = next((candidate for candidate in candidates if candidate.is_best), None)
    better = next((candidate for candidate in compared if candidate.is_best), None)
    if better is None or (best is not None and best.precision == better.precision):
        return ""
    words = f"In {precision_label(better.precision)}, {better.name} would"
    if best is None:
        return f"{words} fit."
    if best.step_s is None or better.step_s is None or is_as_fast(best.step_s, better.step_s):
        return ""
    if better.step_s < SHORTEST_S:
        return ""
    seconds = format_seconds(better.step_s)
    return f"{words} take about {seconds} a step."


class _Order:
    """The simpler way first, and of one way the simpler precision."""

    def __init__(self, found: Mapping[str, object]) -> None:
        self._places = {name: place for place, name in enumerate(found)}

    def __call__(self, candidate: Candidate) -> tuple[int, int]:
        place = self._places[candidate.name]
        if candidate.precision in _SIMPLEST_FIRST:
            return place, _SIMPLEST_FIRST.index(candidate.precision)
        return place, len(_SIMPLEST_FIRST) + precision_row(candidate.precision).has_backends


def _shown_once(by_precision: Mapping[str, Candidate]) -> Iterator[Candidate]:
    """All of one way, or the first of them where each is refused for the same reason."""
    candidates = list(by_precision.values())
    refusals = {candidate.refusal for candidate in candidates}
    is_refused = len(refusals) == 1 and "" not in refusals
    yield from candidates[:1] if is_refused else candidates


# ----------------------------------------------------------------------- before they are asked for
def precision_variants(
    config: RunConfig, precision_names: Sequence[str], *, may_recompute: bool
) -> Iterator[RunConfig]:
    """Runs whose activations differ: in each precision, kept and computed again."""
    choices = (False, True) if may_recompute else (config.activation_checkpointing,)
    for precision_name in precision_names:
        for with_recompute in choices:
            yield config.changed(
                mixed_precision=precision_name, activation_checkpointing=with_recompute
            )


def measure_later(memory_model: MemoryModel, config: RunConfig) -> None:
    """Measure the activations of a run, so that a later choice need not."""
    with contextlib.suppress(ConfigError):  # reported when it is chosen
        sizes = (
            settings_form.batch_size(settings_form.document(config) or {})
            for settings_form in settings_forms()
        )
        memory_model.activation_bytes(config, next(filter(None, sizes), None))


# ----------------------------------------------------------------------- how they are shown
def groups_of_ways(candidates: Sequence[Candidate]) -> Iterator[tuple[str, list[Candidate]]]:
    """The ways, each with its precisions."""
    for name, of_way in groupby(candidates, key=lambda candidate: candidate.name):
        yield name, list(of_way)


def is_shown_once(of_way: Sequence[Candidate]) -> bool:
    """Whether a way cannot be taken in any precision, so that no precision is named beside it."""
    return len(of_way) == 1 and bool(of_way[0].refusal)


def button_names(candidates: Sequence[Candidate], *, compares: bool) -> list[str]:
    """What the buttons of candidates are called."""
    if not compares:
        return [candidate.name for candidate in candidates]
    return [
        candidate.name if is_shown_once(of_way) else name_with_precision(candidate)
        for _, of_way in groups_of_ways(candidates)
        for candidate in of_way
    ]
