"""Live workers: the bars, and the result as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from harness import table
from harness.bars import Verdict, at_most
from harness.live import OURS, SUBJECTS
from harness.samples import Results

BEGIN, END = "<!-- pool:begin -->", "<!-- pool:end -->"
START_S, TRIP_MS, ERROR_S, KILL_S = 0.2, 2.0, 0.3, 0.2
HOME_COPIES = 1.5
Cell = Callable[[Results, str, str], str]

TITLES = {
    "a": "(a) request → first cell answered by 2 workers that have torch, s",
    "b": "(b) round trip of `1+1`, ms",
    "c": "(c) a model of 1 GiB",
    "d": "(d) processor time at rest, s per minute",
    "e": "(e) rank 1 raises while rank 0 waits in an all-reduce",
    "f": "(f) rank 1 killed by SIGKILL while rank 0 waits in an all-reduce",
}


# ---- bars


def judge(results: Results) -> list[Verdict]:
    """One verdict per bar that the measured sections can answer."""
    judges: dict[str, Callable[[Results], Iterator[Verdict]]] = {
        "a": _start,
        "b": _trip,
        "c": _state,
        "e": _error,
        "f": _kill,
    }
    if not any(subject == OURS for _, subject in results.samples):
        return []
    verdicts = [
        v for section in judges if section in results.sections for v in judges[section](results)
    ]
    bad = [m for (m, who), s in results.samples.items() if who == OURS and (s.hangs or s.errors)]
    found = ", ".join(bad) or "none"
    return [*verdicts, Verdict("a-f", "nbaccel: measures that hang or fail: none", found, not bad)]


def _start(results: Results) -> Iterator[Verdict]:
    found = results.median("a warm", OURS)
    yield at_most("a", "2 workers with torch have answered, template ready", found, START_S, "s")


def _trip(results: Results) -> Iterator[Verdict]:
    found = results.median("b trip", OURS)
    milliseconds = None if found is None else found * 1000
    yield at_most(
        "b",
        "1+1 on 2 workers and back, in the kernel, nothing to show",
        milliseconds,
        TRIP_MS,
        "ms",
    )


def _state(results: Results) -> Iterator[Verdict]:
    samples = results.get("c read", OURS)
    most = max((fact["nbytes"] for fact in samples.facts), default=None) if samples else None
    yield at_most("c", "an unchanged 1 GiB model, sent for the next cell", most, 0, "bytes")
    found = results.median("c home, copies", OURS)
    yield at_most("c", "weights trained by an optimizer, copied back", found, HOME_COPIES, "copies")


def _error(results: Results) -> Iterator[Verdict]:
    found = results.median("e error", OURS)
    yield at_most("e", "an error in rank 1, end of the cell", found, ERROR_S, "s")
    yield _told(results, "e error", "the right rank and the error's text are shown")


def _kill(results: Results) -> Iterator[Verdict]:
    found = results.median("f kill", OURS)
    yield at_most("f", "SIGKILL of rank 1, end of the cell", found, KILL_S, "s")
    yield _told(results, "f kill", "the right rank and SIGKILL are named")


def _told(results: Results, measure: str, promise: str) -> Verdict:
    samples = results.get(measure, OURS)
    facts = samples.facts if samples else []
    right = [fact["says_why"] and fact["blamed_rank"] == 1 for fact in facts]
    return Verdict(measure[0], promise, f"{sum(right)} of {len(right)}", bool(right) and all(right))


# ---- cells of the table


def timing(form: str = "{:.3f}", scale: float = 1.0) -> Cell:
    """`median (ratio to nbaccel's)`, and whatever went otherwise."""

    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        if samples is None:
            return ""
        told = []
        if samples.median is not None:
            told.append(form.format(samples.median * scale))
            ours = results.median(measure, OURS)
            if subject != OURS and ours:
                told[0] += f" ({samples.median / ours:.3g}x)"
        told += [text for text in (table.trouble(samples),) if text]
        return ", ".join(told)

    return cell


def share(fact: str, wanted: Any = True) -> Cell:
    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        facts = [entry for entry in samples.facts if fact in entry] if samples else []
        return f"{sum(entry[fact] == wanted for entry in facts)} of {len(facts)}" if facts else ""

    return cell


def middle(fact: str) -> Cell:
    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        if samples is None or not samples.facts:
            return ""
        return f"{statistics.median(entry[fact] for entry in samples.facts):.0f}"

    return cell


def size(results: Results, measure: str, subject: str) -> str:
    samples = results.get(measure, subject)
    if samples is None or not samples.facts:
        return ""
    nbytes = statistics.median(entry["nbytes"] for entry in samples.facts)
    return f"{nbytes:.0f} B" if nbytes < 2**20 else f"{nbytes / 2**30:.2f} GiB"


def rows(section: str) -> list[tuple[str, str, Cell]]:
    """Label, measure and how a cell is made of it."""
    seconds, milliseconds = timing(), timing("{:.2f}", 1000)
    if section == "a":
        return [
            ("notebook and extension at rest", "a warm", seconds),
            ("extension loaded by the same request", "a cold", seconds),
            ("notebook has not imported torch", "a bare", seconds),
        ]
    if section == "b":
        return [
            ("in the kernel, around the magic, nothing to show", "b trip", milliseconds),
            ("in the kernel, around the magic, results shown", "b shown", milliseconds),
            ("the whole cell, at the client", "b cell", milliseconds),
            ("a plain cell of the notebook, at the client", "b plain", milliseconds),
        ]
    if section == "c":
        return [
            ("first push, s", "c push", seconds),
            ("… copied or sent", "c push", size),
            ("push of the unchanged model, s", "c again", seconds),
            ("… copied or sent", "c again", size),
            ("a cell that reads the unchanged model, s", "c read", seconds),
            ("… copied or sent", "c read", size),
            ("trained weights into the notebook's model, s", "c home", seconds),
            ("… in copies of as many bytes", "c home, copies", timing("{:.2f}")),
            ("the same, written by hand, s", "c hand", seconds),
            ("… in copies of as many bytes", "c hand, copies", timing("{:.2f}")),
        ]
    if section == "d":
        return [
            ("workers and helpers", "d others", timing("{:.4f}")),
            ("… processes", "d others", middle("num_processes")),
            ("the notebook's kernel", "d kernel", timing("{:.4f}")),
        ]
    measure, why = (
        ("e error", "the error's text shown") if section == "e" else ("f kill", "SIGKILL named")
    )
    return [
        ("until the cell ended, s", measure, seconds),
        ("the right rank named", measure, share("blamed_rank", 1)),
        (why, measure, share("says_why")),
        ("lines shown", measure, middle("num_lines")),
        ("the next cell answered by two", measure, share("next")),
    ]


def _section(results: Results, section: str) -> str:
    subjects = [s.name for s in SUBJECTS if any(who == s.name for _, who in results.samples)]
    grid = []
    for label, measure, cell in rows(section):
        cells = [cell(results, measure, subject) for subject in subjects]
        if any(cells):
            grid.append(
                [
                    label,
                    *(
                        text or _absence(section, subject)
                        for text, subject in zip(cells, subjects, strict=True)
                    ),
                ]
            )
    return table.as_grid(["", *subjects], grid)


def _absence(section: str, subject: str) -> str:
    offers = {s.name: s.offers_state for s in SUBJECTS}
    return "not offered" if section == "c" and not offers[subject] else "-"


def render(results: Results, verdicts: list[Verdict]) -> str:
    """The whole text that stands between the markers in docs/pages/figures.md."""
    blocks = []
    for section, title in TITLES.items():
        if section in results.sections:
            blocks += [f"### {title}", _section(results, section)]
            blocks.append(table.provenance(results.sections[section]))
    told = [table.verdicts(verdicts), "### Machine and versions", table.machines(results)]
    return "\n\n".join([*blocks, *told]) + "\n"
