"""The facts of a finished run, and their form as JSON.

[Note: the JSON form] `format` is `"nbaccel.report"` and `version` is 1; a later version may add
keys, and gets another number where a key changes its meaning or goes. Times are in seconds, sizes
in bytes, what is not known is null. JSON has no numbers beside finite ones: a metric that was none
is `"nan"`, `"inf"` or `"-inf"`.

    began        when the run began: ISO 8601, in UTC
    seconds      how long it took
    title        what was run: the name of a function, or a cell's number
    ending       "" if it ended well; else `failed`, `stopped` or `timed out`
    plan         text (as `plan.explain()`), headline, device, num_processes, world_size, warnings
    ranks        per rank: rank, state, progress (of its loops, as text), steps, steps_in_all,
                 steps_per_s, samples, samples_per_s, peak_host_bytes, peak_device_bytes,
                 compiled (programs of a compiling device, as text), times (or null): total_s,
                 computing_s, communicating_s, data_s, waiting_s, is_partial, starting_s (the first
                 step's start, in no other part)
    advice       what is wrong and what to do, in sentences
    slowest      the rank that the others wait for (or null): rank, waited_s, waited_share
    curves       per metric and rank: name, rank, steps, values (all, or the extremes of stretches)
    marks        on the curves: step, text
    warnings     per text: text, count, ranks
    notes        what was not measured, and why
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from nbaccel.base.errors import ConfigError
from nbaccel.base.training_metrics import Point
from nbaccel.config.capabilities import device_row
from nbaccel.output.panel.facts import RankFacts, RunBoard, SeenLine, loss_first, steps_in_all
from nbaccel.output.panel.rank_times import RankTimes, SlowestRank
from nbaccel.output.panel.words import advice_of, compile_words, left_out_sentence, progress_of
from nbaccel.plan import Plan

FORMAT_NAME = "nbaccel.report"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """What was planned."""

    text: str
    headline: str
    device: str
    num_processes: int
    world_size: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank has done and needed."""

    rank: int
    state: str = ""
    progress: str = ""
    steps: int | None = None
    steps_in_all: int | None = None
    """How many it would have taken in the end."""
    steps_per_s: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    compiled: str = ""
    """What its device's compiler has done, in words."""
    times: RankTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a report tells; see [Note: the JSON form]."""

    nbaccel_version: str
    began: str
    seconds: float
    ending: str
    plan: PlannedRun
    title: str = ""
    ranks: tuple[RankFigures, ...]
    advice: tuple[str, ...] = ()
    slowest: SlowestRank | None = None
    curves: dict[str, dict[int, list[Point]]] = field(default_factory=dict)
    """Metric → rank → what it has logged."""
    marks: tuple[tuple[float, str], ...] = ()
    warnings: tuple[SeenLine, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def timed_ranks(self) -> dict[int, RankTimes]:
        """The times of ranks of which they are known."""
        return {one.rank: one.times for one in self.ranks if one.times is not None}

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None where none counts samples."""
        known = [figures.samples_per_s for figures in self.ranks]
        return sum(rate for rate in known if rate is not None) if any(known) else None

    @property
    def metric_names(self) -> list[str]:
        """In the order in which they were logged, the one that is shown first in front."""
        return loss_first(self.curves)


# ------------------------------------------------------------------------- of a board


def facts_of(board: RunBoard, plan: Plan) -> RunFacts:
    """The facts of a run that has ended."""
    times = board.times.by_rank()
    return RunFacts(
        nbaccel_version=sys.modules["nbaccel"].__version__,
        began=board.began_on.isoformat(timespec="seconds"),
        seconds=board.seconds,
        ending=board.ending,
        title=board.title,
        plan=PlannedRun(
            text=plan.explain(),
            headline=plan.headline(),
            device=plan.device,
            num_processes=plan.num_processes,
            world_size=plan.world_size,
            warnings=plan.warnings,
        ),
        ranks=tuple(
            _figures_of(facts, times.get(rank), board.now) for rank, facts in board.ranks.items()
        ),
        advice=tuple(advice_of(board)),
        slowest=board.times.slowest(),
        curves={name: board.curves(name) for name in board.metric_names()},
        marks=tuple(board.marks),
        warnings=tuple(board.warnings.by_text.values()),
        notes=tuple(_notes_of(board, plan, list(times.values()))),
    )


def _figures_of(facts: RankFacts, times: RankTimes | None, now: float) -> RankFigures:
    return RankFigures(
        rank=facts.rank,
        state=facts.told.phase or facts.state,
        progress=" · ".join(filter(None, (loop.words for loop in progress_of(facts)))),
        steps=facts.told.steps,
        steps_in_all=steps_in_all(facts, now),
        steps_per_s=facts.pace.overall,
        samples=facts.told.samples or None,
        samples_per_s=facts.samples_pace.overall if facts.told.samples else None,
        peak_host_bytes=facts.memory.peak_rss or None,
        peak_device_bytes=facts.memory.peak_device,
        compiled=compile_words(facts),
        times=times,
    )


def _notes_of(board: RunBoard, plan: Plan, times: list[RankTimes]) -> Iterable[str]:
    """What was measured how, and what was not."""
    if times:
        yield (
            "Times begin with a rank's first loop over batches. Waiting for data is known of "
            "DataLoaders and of accelerator.progress; computing is what is left."
        )
    else:
        yield (
            "No times: no rank has gone through a DataLoader, stepped an optimizer or called "
            "accelerator.log."
        )
    if len(times) > 1:
        yield (
            "Waiting for others is what a rank spent in collectives beyond the rank that spent "
            "least there, compared over two seconds each."
        )
    if times and not device_row(plan.device).in_host_memory:
        yield (
            f"On {plan.device}, collectives run beside the program. Counted are those of nbaccel "
            "and what torch measures of DDP's exchange of gradients; others are in computing."
        )
    if any(rank_times.is_partial for rank_times in times):
        yield (
            "This torch does not tell how long DDP's exchange of gradients takes: it is in "
            "computing, and so is waiting for others there."
        )
    has_memory = any(facts.memory.peak_rss for facts in board.ranks.values())
    yield (
        "Memory was looked at once a second; what was taken for less may not show."
        if has_memory
        else "Memory is looked at once a second, and the run had ended before."
    )
    if sentence := left_out_sentence(board):
        yield f"{sentence}."
    if board.warnings.num_left_out:
        yield f"{board.warnings.num_left_out:,} more warnings with other texts were not kept."


# ------------------------------------------------------------------------- as JSON


def facts_as_json(facts: RunFacts) -> dict[str, Any]:
    """The facts in plain containers; see [Note: the JSON form]."""
    document: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION}
    document |= dataclasses.asdict(facts)
    document["marks"] = [{"step": step, "text": text} for step, text in facts.marks]
    document["curves"] = [
        {
            "name": name,
            "rank": rank,
            "steps": [step for step, _ in points],
            "values": [value for _, value in points],
        }
        for name, curves in facts.curves.items()
        for rank, points in curves.items()
    ]
    plain: dict[str, Any] = _as_plain(document)
    return plain


def facts_from_json(document: Mapping[str, Any]) -> RunFacts:
    """What `facts_as_json` has made."""
    kind = (document.get("format"), document.get("version"))
    if kind != (FORMAT_NAME, FORMAT_VERSION):
        raise ConfigError(
            f"This is no report that can be read: format and version are {kind[0]!r} and "
            f"{kind[1]!r}, and {FORMAT_NAME!r} and {FORMAT_VERSION} are known. Give what "
            "RunReport.to_dict returned."
        )
    try:
        plain = json.loads(json.dumps({**document}))
        plain["marks"] = [(mark["step"], mark["text"]) for mark in plain["marks"]]
        curves: dict[str, dict[int, list[Any]]] = {}
        for curve in plain["curves"]:
            values = [float(y) if y in ("nan", "inf", "-inf") else y for y in curve["values"]]
            points = list(zip(curve["steps"], values, strict=True))
            curves.setdefault(curve["name"], {})[curve["rank"]] = points
        plain["curves"] = curves
        # As JSON, for which strict types take lists as tuples and whole numbers as others.
        return TypeAdapter(RunFacts).validate_json(json.dumps(plain), strict=True)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"This report cannot be read: {error}. It was changed, or is not whole: what it says "
            "would be shown as a page. Give what RunReport.to_dict returned."
        ) from error


def _as_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_plain(held) for key, held in value.items()}
    if isinstance(value, set):
        return sorted(value)
    return [_as_plain(held) for held in value] if isinstance(value, (list, tuple)) else value
