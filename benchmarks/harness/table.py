"""The result as Markdown: a table per section, the bars, and where and when it was taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import home, libraries
from harness.bars import OURS, Verdict
from harness.samples import Results, Samples
from harness.subjects import PEER, SUBJECTS

BEGIN, END = "<!-- launch:begin -->", "<!-- launch:end -->"
Cell = Callable[[Results, str, str], str]

CASES = {
    "noop": "no-op",
    "model": "1 GiB model in `args`",
    "adamw": "one DDP step with AdamW",
    "matmul": "a matrix product on all threads",
}
TITLES = {
    "a": "(a) call → returned, 2 workers with a gloo group, s",
    "b": "(b) memory over kernel + model, PSS, MiB",
    "c": "(c) 1 GiB of changed weights copied back",
    "d": "(d) Stop → prompt, s",
    "e": "(e) rank 1 killed by SIGKILL while rank 0 waits in an all-reduce",
    "f": "(f) rank 1 raises while rank 0 waits in an all-reduce",
    "g": "(g) functions that use libraries: call → returned, 2 workers with a gloo group, s",
}


def timing(results: Results, measure: str, subject: str) -> str:
    """`median (ratio to the peer)`, and whatever went otherwise."""
    samples = results.get(measure, subject)
    if samples is None:
        return ""
    return ", ".join(
        part for part in (_number(results, measure, subject), trouble(samples)) if part
    )


def _number(results: Results, measure: str, subject: str) -> str:
    ours, theirs = results.median(measure, subject), results.median(measure, PEER)
    if ours is None:
        return ""
    is_memory = measure.startswith("b")
    text = f"{ours:.0f}" if is_memory else f"{ours:.3f}"
    has_ratio = theirs and (not is_memory or measure.endswith("whole"))
    return f"{text} ({ours / theirs:.2f}x)" if has_ratio and theirs else text


def trouble(samples: Samples) -> str:
    told = []
    if samples.hangs:
        told.append(f"**hangs** {samples.hangs} of {samples.num_tries}")
    if samples.errors:
        told.append(f"**fails** {len(samples.errors)} of {samples.num_tries}")
    return ", ".join(told)


def count(fact: str, wanted: Any = True) -> Cell:
    """In how many of the repeats the cell was as wanted."""

    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        if samples is None or not samples.facts:
            return ""
        found = [entry[fact] == wanted for entry in samples.facts]
        return f"{sum(found)} of {len(found)}"

    return cell


def median_of(fact: str) -> Cell:
    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        if samples is None or not samples.facts:
            return ""
        ours = statistics.median(entry[fact] for entry in samples.facts)
        peer = results.get(measure, PEER)
        if peer is None or not peer.facts:
            return f"{ours:.0f}"
        theirs = statistics.median(entry[fact] for entry in peer.facts)
        return f"{ours:.0f} ({ours / theirs:.2f}x)"

    return cell


def part_of_memory(part: str) -> Cell:
    def cell(results: Results, measure: str, subject: str) -> str:
        samples = results.get(measure, subject)
        if samples is None or not samples.facts:
            return ""
        return f"{statistics.median(entry['parts'][part] for entry in samples.facts):.0f}"

    return cell


def _rows(section: str) -> list[tuple[str, str, Cell]]:
    """Label, measure and how a cell is made of it."""
    if section == "a":
        rows: list[tuple[str, str, Cell]] = [
            ("no-op, first, just imported", "a noop first just-imported", timing)
        ]
        for case, label in CASES.items():
            for state in ("fresh", "used"):
                for when in ("first", "later"):
                    row = (f"{label}, {when}, {state} kernel", f"a {case} {when} {state}", timing)
                    rows.append(row)
        return rows
    if section == "b":
        rows = []
        for n in (2, 4):
            rows.append((f"{n} workers: over kernel + model", f"b {n} workers", timing))
            rows.append((f"{n} workers: the whole", f"b {n} whole", timing))
        for part in ("kernel", "workers", "others"):
            label = f"4 workers: of the whole, {part}"
            rows.append((label, "b 4 workers", part_of_memory(f"{part}_mib")))
        return rows
    if section == "d":
        names = {
            "collective": "rank 0 in an all-reduce, rank 1 asleep",
            "receive": "both ranks in a receive",
            "sleep": "both asleep",
        }
        return [
            row
            for where, label in names.items()
            for row in (
                (label, f"d {where}", timing),
                ("… no worker left", f"d {where}", count("num_left", 0)),
            )
        ]
    if section == "g":
        return _library_rows()
    measure = "e killed" if section == "e" else "f error"
    told = (
        ("SIGKILL named", measure, count("names_signal"))
        if section == "e"
        else ("the cell's own line shown", measure, count("has_own_line"))
    )
    return [
        ("until the cell ended, s", measure, timing),
        told,
        ("the right rank blamed", measure, count("blamed_rank", 1)),
        ("lines shown", measure, median_of("num_lines")),
        ("no worker left", measure, count("num_left", 0)),
    ]


def _library_rows() -> list[tuple[str, str, Cell]]:
    rows: list[tuple[str, str, Cell]] = [
        (
            f"{library.label}, {when}, {state} kernel",
            libraries.measure(library.name, when, state),
            timing,
        )
        for library in libraries.LIBRARIES
        for state in libraries.STATES
        for when in ("first", "later")
    ]
    rows.append(("no-op, in the cell that imports the launcher", libraries.JUST_IMPORTED, timing))
    memory = "4 workers that use transformers, MiB"
    rows += [
        (f"{memory}: PSS of {part}", libraries.WEIGHED, part_of_memory(f"{part}_mib"))
        for part in ("workers", "others")
    ]
    rows.append((f"{memory}: of one, shared with nobody", libraries.WEIGHED, median_of("own_mib")))
    return rows


def as_grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _section(results: Results, section: str) -> str:
    measured = {who for measure, who in results.samples if measure.split()[0] == section}
    subjects = [subject.name for subject in SUBJECTS if subject.name in measured]
    grid = []
    for label, measure, cell in _rows(section):
        cells = [cell(results, measure, subject) for subject in subjects]
        if any(cells):
            grid.append([label, *(text or "-" for text in cells)])
    return as_grid(["", *subjects], grid)


def _home_section(results: Results) -> str:
    subjects = [name for name in OURS if results.get("c sgd home", name)]
    rows = []
    for how, label in (("sgd", "one plain SGD step"), ("hand", "`add_` under `no_grad`")):
        for step, told in (("kept", "`share_back=False`"), ("home", "`share_back=True`")):
            cells = [_seconds(results.median(f"c {how} {step}", name)) for name in subjects]
            rows.append([f"launch, weights changed by {label}, {told}, s", *cells])
        for copy in ("warm", "fresh"):
            ratios = [home.in_copies(results, name, how, copy) for name in subjects]
            cells = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
            rows.append([f"… the difference, in memcpys into {copy} memory", *cells])
    for copy in ("warm", "fresh"):
        cells = [_seconds(results.median(f"c memcpy {copy}", name)) for name in subjects]
        rows.append([f"one memcpy of 1 GiB into {copy} memory, one thread, s", *cells])
    note = "accelerate, fabric and torch.multiprocessing leave the notebook's model untrained."
    return (as_grid(["", *subjects], rows) + "\n\n" if subjects else "") + note


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def provenance(facts: dict[str, Any]) -> str:
    where = "each kernel in namespaces of its own"
    if not facts["isolated"]:
        where = "**without namespaces**: the kernels shared the machine's network and processes"
    return f"Taken {facts['taken']}, {facts['repeats']} repeats, {where}; load {facts['load']}."


def machines(results: Results) -> str:
    """Hardware and versions, once if all sections agree."""
    told: dict[str, list[str]] = {}
    for section, facts in sorted(results.sections.items()):
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        machine = f"{facts['num_cores']} cores, {facts['memory_gib']} GiB, {facts['system']}"
        told.setdefault(f"{machine}; {versions}.", []).append(f"({section})")
    return "\n\n".join(f"{' '.join(sections)}: {text}" for text, sections in told.items())


def _strangers(results: Results) -> str:
    """Whether another process shared the library's pages while memory was weighed."""
    found = [
        fact.get("num_strangers", 0) > 0
        for (measure, _), samples in results.samples.items()
        if measure.startswith("b")
        for fact in samples.facts
    ]
    return f"{sum(found)} of {len(found)} samples had a process beside them that maps PyTorch."


def verdicts(found: list[Verdict]) -> str:
    if not found:
        return "### Bars\n\nnbaccel has not been measured in this run."
    lines = [
        f"- {'pass' if verdict.holds else '**FAIL**'} ({verdict.section}) "
        f"{verdict.promise}: found {verdict.found}"
        for verdict in found
    ]
    return "### Bars\n\n" + "\n".join(lines)


def render(results: Results, judged: list[Verdict]) -> str:
    """The whole text that stands between the markers in docs/pages/figures.md."""
    blocks = []
    for section, title in TITLES.items():
        if section in results.sections:
            body = _home_section(results) if section == "c" else _section(results, section)
            blocks += [f"### {title}", body]
            if section == "b":
                blocks.append(_strangers(results))
            blocks.append(provenance(results.sections[section]))
    blocks += [verdicts(judged), "### Machine and versions", machines(results)]
    return "\n\n".join(blocks) + "\n"


def put_into(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no place for the table between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")
