"""The ways to train in each precision that the machine has, as they are named and grouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from nbaccel.memory.ways import Candidate
from nbaccel.notebook.picker.choices import by_name


def precision_label(precision_name: str) -> str:
    """A precision as the form writes it: ``fp32`` for ``no``."""
    labels = {option.value: option.label for option in by_name()["mixed_precision"].options}
    return labels.get(precision_name, precision_name)


def name_with_precision(candidate: Candidate) -> str:
    """Both in a few words: ``ZeRO-2 in bf16``."""
    return f"{candidate.name} in {precision_label(candidate.precision)}"


def hint_of(candidates: Sequence[Candidate], compared: Sequence[Candidate]) -> str:
    """Which other precision would be better."""
    best = next((candidate for candidate in candidates if candidate.is_best), None)
    better = next((candidate for candidate in compared if candidate.is_best), None)
    if better is None or (best is not None and best.precision == better.precision):
        return ""
    words = f"In {precision_label(better.precision)}, {better.name} would fit"
    return f"{words}." if best is None else f"{words}, too, and is usually faster."


def groups_of_ways(candidates: Sequence[Candidate]) -> Iterator[tuple[str, list[Candidate]]]:
    """The ways, each with its precisions."""
    for name, of_way in groupby(candidates, key=lambda candidate: candidate.name):
        yield name, list(of_way)


def is_shown_once(of_way: Sequence[Candidate]) -> bool:
    """Whether a way cannot be taken in any precision, so that no precision is named beside it."""
    return len(of_way) == 1 and bool(of_way[0].refusal)
