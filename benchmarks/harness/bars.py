"""What nbaccel promises about launching, as inequalities over one result file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness import home, libraries
from harness.subjects import PEER

if TYPE_CHECKING:
    from harness.samples import Results, Samples

TEMPLATE, FORK = "nbaccel-template", "nbaccel-fork"
OURS = (TEMPLATE, FORK)
STATES = ("fresh", "used")
HANDOVER_S = 0.010
MEMORY_MIB = {FORK: 150.0, TEMPLATE: 400.0}
MEMCPYS = 1.5
MEMCPYS_BY_HAND = 3.0  # read page by page in another process, and not in one piece
STOP_S, KILLED_S, ERROR_S = 0.5, 1.0, 3.0
ERROR_LINES = 40
LATER_OF_FORK, LATER_OF_PEER, FIRST_OF_FORK = 1.3, 1 / 3, 1.5
JUST_IMPORTED_S, MEMORY_OF_FORK = 0.6, 1.2


@dataclass(frozen=True)
class Verdict:
    section: str
    promise: str
    found: str
    holds: bool


def judge(results: Results) -> list[Verdict]:
    """One verdict per bar that the measured sections can answer."""
    judges: dict[str, Callable[[Results], Iterator[Verdict]]] = {
        "a": _latency,
        "b": _memory,
        "c": _home,
        "d": _stop,
        "e": _killed,
        "f": _error,
        "g": _libraries,
    }
    if not any((subject in OURS) for _, subject in results.samples):
        return []
    measured = [judge for section, judge in judges.items() if section in results.sections]
    return [verdict for judge in measured for verdict in judge(results)]


def at_most(section: str, what: str, found: float | None, bar: float, unit: str) -> Verdict:
    promise = f"{what}: at most {bar:.3g} {unit}"
    if found is None:
        return Verdict(section, promise, "not measured", False)
    return Verdict(section, promise, f"{found:.3g} {unit}", found <= bar)


def _trouble(samples: Samples | None) -> bool:
    return samples is None or bool(samples.hangs or samples.errors) or not samples.values


def _latency(results: Results) -> Iterator[Verdict]:
    for state in STATES:
        for subject in OURS:
            where = f"{subject}, {state} kernel"
            ours = results.median(f"a noop later {state}", subject)
            yield _share(results, f"a noop later {state}", subject, 0.5)
            model = results.median(f"a model later {state}", subject)
            extra = None if ours is None or model is None else (model - ours) * 1000
            what = f"{where}: handing over a shared 1 GiB model, more than a no-op"
            yield at_most("a", what, extra, HANDOVER_S * 1000, "ms")
        yield _share(results, f"a adamw later {state}", TEMPLATE, 0.2)
    for subject in OURS:
        rows = [name for name, who in results.samples if who == subject and name[0] == "a"]
        bad = [name for name in rows if _trouble(results.get(name, subject))]
        found = "none" if not bad else ", ".join(bad)
        yield Verdict("a", f"{subject}: launches that hang or fail: none", found, not bad)


def _share(results: Results, measure: str, subject: str, bar: float) -> Verdict:
    ours, theirs = results.median(measure, subject), results.median(measure, PEER)
    ratio = None if ours is None or not theirs else ours / theirs
    _, case, when, state = measure.split()
    return at_most(
        "a", f"{subject}, {state} kernel: {case}, {when} launches", ratio, bar, f"of {PEER}'s time"
    )


def _memory(results: Results) -> Iterator[Verdict]:
    for subject in OURS:
        for num_processes in (2, 4):
            measure = f"b {num_processes} workers"
            found = results.median(measure, subject)
            what = f"{subject}, {num_processes} workers: memory over kernel and model"
            if subject == FORK:
                found = _without_template(results.get(measure, subject))
                what += ", less the template that waits unused"
            yield at_most("b", what, found, MEMORY_MIB[subject], "MiB")


def _without_template(samples: Samples | None) -> float | None:
    """What a fork adds by itself; the table has what is there in all, and the template's part."""
    if samples is None or not samples.values:
        return None
    others: list[float] = [fact["parts"]["others_mib"] for fact in samples.facts]
    return statistics.median(a - b for a, b in zip(samples.values, others, strict=True))


def _home(results: Results) -> Iterator[Verdict]:
    for subject in OURS:
        what = f"{subject}, weights changed by an optimizer, copied back"
        found = home.in_copies(results, subject, "sgd")
        yield at_most("c", what, found, MEMCPYS, "memcpys")
        what = f"{subject}, weights changed by hand, copied back"
        found = home.in_copies(results, subject, "hand")
        yield at_most("c", what, found, MEMCPYS_BY_HAND, "memcpys")


def _stop(results: Results) -> Iterator[Verdict]:
    for subject in OURS:
        for where in ("collective", "receive", "sleep"):
            samples = results.get(f"d {where}", subject)
            median = samples.median if samples else None
            yield at_most("d", f"{subject}, workers in a {where}: Stop", median, STOP_S, "s")
            left = [fact["num_left"] for fact in samples.facts] if samples else []
            clean = not _trouble(samples) and not any(left)
            what = f"{subject}, workers in a {where}: every Stop ends the cell, no worker is left"
            yield Verdict("d", what, f"left each time: {left}", clean)


def _killed(results: Results) -> Iterator[Verdict]:
    for subject in OURS:
        samples = results.get("e killed", subject)
        median = samples.median if samples else None
        yield at_most("e", f"{subject}: SIGKILL of a worker, end of cell", median, KILLED_S, "s")
        facts = samples.facts if samples else []
        right = [fact["names_signal"] and fact["blamed_rank"] == 1 for fact in facts]
        promise = f"{subject}: SIGKILL and the right rank are named"
        holds = bool(right) and all(right) and not _trouble(samples)
        yield Verdict("e", promise, f"{sum(right)} of {len(right)}", holds)


def _error(results: Results) -> Iterator[Verdict]:
    for subject in OURS:
        samples = results.get("f error", subject)
        median = samples.median if samples else None
        yield at_most("f", f"{subject}: an error in rank 1, end of cell", median, ERROR_S, "s")
        facts = samples.facts if samples else []
        lines = max((fact["num_lines"] for fact in facts), default=None)
        yield at_most("f", f"{subject}: most lines shown", lines, ERROR_LINES, "lines")
        right = [fact["has_own_line"] and fact["blamed_rank"] == 1 for fact in facts]
        promise = f"{subject}: the cell's own line and the right rank are shown"
        holds = bool(right) and all(right) and not _trouble(samples)
        yield Verdict("f", promise, f"{sum(right)} of {len(right)}", holds)


def _libraries(results: Results) -> Iterator[Verdict]:
    for library in libraries.LIBRARIES:
        for state in libraries.STATES:
            first = libraries.measure(library.name, "first", state)
            later = libraries.measure(library.name, "later", state)
            if results.get(first, TEMPLATE) is not None:
                yield _of_other(results, later, FORK, LATER_OF_FORK)
                yield _of_other(results, later, PEER, LATER_OF_PEER)
                yield _of_other(results, first, FORK, FIRST_OF_FORK)
    found = results.median(libraries.JUST_IMPORTED, TEMPLATE)
    what = f"{TEMPLATE}: the launch in the cell that imports nbaccel, torch being there"
    yield at_most("g", what, found, JUST_IMPORTED_S, "s")
    ours, forked = (_weighed(results, subject) for subject in (TEMPLATE, FORK))
    for part, kind in (("workers", "PSS of"), ("own", "memory that is shared with nobody in")):
        ratio = ours[part] / forked[part] if ours and forked else None
        what = f"{TEMPLATE}: {kind} 4 workers that use transformers"
        yield at_most("g", what, ratio, MEMORY_OF_FORK, f"of {FORK}'s")
    beside = ours["others"] if ours else None
    yield at_most("g", f"{TEMPLATE}: templates beside them", beside, 1, "processes")


def _of_other(results: Results, measure: str, other: str, bar: float) -> Verdict:
    """The template against another subject; one that hangs or fails there is slower."""
    ours, theirs = results.median(measure, TEMPLATE), results.median(measure, other)
    _, library, when, state = measure.split()
    what = f"{TEMPLATE}, {state} kernel: {library}, {when} launches"
    unit = f"of {other}'s time"
    if ours is not None and theirs is None:
        good = not _trouble(results.get(measure, TEMPLATE))
        return Verdict("g", f"{what}: at most {bar:.3g} {unit}", f"{other} has none", good)
    return at_most("g", what, None if ours is None or not theirs else ours / theirs, bar, unit)


def _weighed(results: Results, subject: str) -> dict[str, float]:
    """Medians in MiB, and how many processes there are beside kernel and workers."""
    samples = results.get(libraries.WEIGHED, subject)
    if samples is None or not samples.facts:
        return {}
    return {
        "workers": statistics.median(fact["parts"]["workers_mib"] for fact in samples.facts),
        "own": statistics.median(fact["own_mib"] for fact in samples.facts),
        "others": max(fact["num_others"] for fact in samples.facts),
    }
