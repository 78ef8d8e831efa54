"""The facts of a finished run, and their form as JSON.

[Note: the JSON form] `format` is `"nbaccel.report"` and `version` is 1; a later version may add
keys, and gets another number where a key changes its meaning or goes. Times are in seconds, sizes
in bytes, what is not known is null. JSON has no numbers beside finite ones: a metric that was none
is `"nan"`, `"inf"` or `"-inf"`.

    began        when the run began: ISO 8601, in UTC
    seconds      how long it took
    ending       "" if it ended well; else `failed`, `stopped` or `timed out`
    plan         text (as `plan.explain()`), headline, device, num_processes, world_size, warnings
    ranks        per rank: rank, steps, steps_per_s, samples, samples_per_s, peak_host_bytes,
                 peak_device_bytes, times (or null): total_s, computing_s, communicating_s, data_s,
                 waiting_s, is_partial, starting_s (the first step's start, in no other part)
    slowest      the rank that the others wait for (or null): rank, waited_s, waited_share
    curves       per metric and rank: name, rank, steps, values (thinned to some hundred)
    marks        on the curves: step, text
    warnings     per text: text, count, ranks
    notes        what was not measured, and why
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from nbaccel.base.errors import ConfigError
from nbaccel.output.dashboard.rank_times import RankTimes, SlowestRank

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MetricCurve",
    "PlannedRun",
    "RankFigures",
    "RunFacts",
    "SeenWarning",
    "facts_as_json",
    "facts_from_json",
]

FORMAT_NAME = "nbaccel.report"
FORMAT_VERSION = 1


def _as_number(value: Any) -> Any:
    """What `_as_plain` wrote for a number that JSON does not have."""
    return float(value) if value in ("nan", "inf", "-inf") else value


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
    steps: int | None = None
    steps_per_s: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    times: RankTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurve:
    """The values of a metric that one rank has logged, thinned."""

    name: str
    rank: int
    steps: tuple[float, ...]
    values: tuple[Annotated[float, BeforeValidator(_as_number)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWarning:
    """A warning in the output of workers."""

    text: str
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a report tells; see [Note: the JSON form]."""

    nbaccel_version: str
    began: str
    seconds: float
    ending: str
    plan: PlannedRun
    ranks: tuple[RankFigures, ...]
    slowest: SlowestRank | None = None
    curves: tuple[MetricCurve, ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    warnings: tuple[SeenWarning, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def timed_ranks(self) -> list[RankTimes]:
        """The times of ranks of which they are known."""
        return [figures.times for figures in self.ranks if figures.times is not None]

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None where none counts samples."""
        known = [figures.samples_per_s for figures in self.ranks]
        return sum(rate for rate in known if rate is not None) if any(known) else None

    @property
    def metric_names(self) -> list[str]:
        """In the order in which they were logged, those of losses first."""
        names = list(dict.fromkeys(curve.name for curve in self.curves))
        return sorted(names, key=lambda name: "loss" not in name.lower())


def facts_as_json(facts: RunFacts) -> dict[str, Any]:
    """The facts in plain containers; see [Note: the JSON form]."""
    document: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION}
    document |= _as_plain(dataclasses.asdict(facts))
    document["marks"] = [{"step": step, "text": text} for step, text in document["marks"]]
    for figures in document["ranks"]:
        if figures["times"] is not None:
            # It is that of the figures.
            del figures["times"]["rank"]
    return document


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
        for figures in plain["ranks"]:
            if figures["times"] is not None:
                figures["times"]["rank"] = figures["rank"]
        plain["marks"] = [(mark["step"], mark["text"]) for mark in plain["marks"]]
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
    if isinstance(value, (list, tuple)):
        return [_as_plain(held) for held in value]
    return value
