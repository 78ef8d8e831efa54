"""``RunReport``: what a finished run can tell of itself; and several runs side by side.

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
import functools
import html
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError
from nbaccel.base.training_metrics import Point
from nbaccel.base.units import (
    count_noun,
    format_bytes,
    format_number,
    format_seconds,
    number_ranges,
    plain_text,
)
from nbaccel.config.capabilities import device_row
from nbaccel.config.given_values import shown
from nbaccel.output.panel import live_html
from nbaccel.output.panel.curves import ChartLine, chart_of, mean_points, metric_chart, sparkline
from nbaccel.output.panel.facts import (
    TIME_KINDS,
    RankFacts,
    RankTimes,
    RunBoard,
    SeenLine,
    SlowestRank,
    loss_first,
    mean,
    percent_of,
    slowest_sentence,
    starting_sentence,
    steps_in_all,
)
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
    steps_in_all: int | None = None  # how many it would have taken in the end
    steps_per_s: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    compiled: str = ""  # what its device's compiler has done, in words
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
        advice=tuple(live_html.advice_of(board)),
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
        progress=" · ".join(filter(None, (loop.words for loop in live_html.progress_of(facts)))),
        steps=facts.told.steps,
        steps_in_all=steps_in_all(facts, now),
        steps_per_s=facts.pace.overall,
        samples=facts.told.samples or None,
        samples_per_s=facts.samples_pace.overall if facts.told.samples else None,
        peak_host_bytes=facts.memory.peak_rss or None,
        peak_device_bytes=facts.memory.peak_device,
        compiled=live_html.compile_words(facts),
        times=times,
    )


def _notes_of(board: RunBoard, plan: Plan, times: list[RankTimes]) -> Iterable[str]:
    if times:
        yield (
            "Times begin with a rank's first loop over batches. Waiting for data is known of "
            "DataLoaders and of accelerator.progress; computing is what is left."
        )
    else:
        yield "No times: no rank has gone through a DataLoader, stepped an optimizer or logged."
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
    if any(facts.memory.peak_rss for facts in board.ranks.values()):
        yield "Memory was looked at once a second; what was taken for less may not show."
    else:
        yield "Memory is looked at once a second, and the run had ended before."
    if sentence := live_html.left_out_sentence(board):
        yield f"{sentence}."
    if board.warnings.num_left_out:
        yield f"{board.warnings.num_left_out:,} more warnings with other texts were not kept."


def _as_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_plain(held) for key, held in value.items()}
    if isinstance(value, set):
        return sorted(value)
    return [_as_plain(held) for held in value] if isinstance(value, (list, tuple)) else value


_MOST_CHARTS = 16  # as many as a rank reports
_SIGNS = {"": "✓", "stopped": "■", "failed": "✗", "timed out": "✗"}

_PART_STYLE = "font-size:13px;line-height:1.5;max-width:1120px"
_HEADING_STYLE = "font-size:14px;font-weight:600;margin:1.4em 0 0.5em"
_CHARTS_STYLE = (
    "display:grid;gap:0.8em 1.6em;"
    "grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))"
)
_PAGE_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c1f23; }
@media (prefers-color-scheme: dark) { :root { --page: #111418; --text: #e6e9ed; } }
body { margin: 0 auto; padding: 24px; max-width: 1120px; background: var(--page);
       color: var(--text); font-family: system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 20px; font-weight: 600; margin: 0 0 0.3em; }
"""


def finished_line(facts: RunFacts) -> str:
    """`2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 ▇▅▂ · up to 1 GiB each`."""
    parts = _finished_parts(facts, with_curve=True)
    return " · ".join([count_noun(len(facts.ranks), "rank"), *parts])


def _finished_parts(facts: RunFacts, *, with_curve: bool = False) -> list[str]:
    ending = f"{facts.ending} after " if facts.ending else ""
    parts = [f"{ending}{format_seconds(facts.seconds)}"]
    if leading := next((figures for figures in facts.ranks if figures.steps is not None), None):
        is_cut = facts.ending and leading.steps_in_all != leading.steps
        in_all = leading.steps_in_all if is_cut else None
        parts += live_html.step_words(
            leading.steps, in_all, leading.steps_per_s, facts.samples_per_s, leading.compiled
        )
    if names := facts.metric_names:
        curves = [*facts.curves[names[0]].values()]
        loss = format_number(mean(points[-1][1] for points in curves))
        curve = f" {sparkline([y for _, y in curves[0]])}" if with_curve else ""
        parts.append(f"{plain_text(names[0], live_html.LABEL_CHARS)} {loss}{curve}")
    if facts.slowest is not None:
        share = facts.slowest.waited_share * 100
        parts.append(f"{share:.0f} % waited for rank {facts.slowest.rank}")
    if on_host := most_bytes(facts, "peak_host_bytes"):
        each = " each" if len(facts.ranks) > 1 else ""
        on_device = most_bytes(facts, "peak_device_bytes")
        parts.append(f"up to {on_host}{each}{f' (on the device {on_device})' if on_device else ''}")
    return parts


def most_bytes(facts: RunFacts, name: str) -> str:
    """`1.0 GiB`, the most of all ranks; empty where it is not known."""
    return _size(max((getattr(figures, name) or 0 for figures in facts.ranks), default=0))


def title_of(facts: RunFacts) -> str:
    """What was run."""
    name = plain_text(facts.title, live_html.LABEL_CHARS) or "Run"
    return f"{name} on {count_noun(facts.plan.num_processes, 'worker')}"


@dataclass(frozen=True, slots=True)
class _Section:
    heading: str
    lines: Sequence[str]
    html: str


def _sections(facts: RunFacts, names: Sequence[str], *, as_image: bool) -> Iterator[_Section]:
    yield _time_section(facts)
    yield _curve_section(facts, names, as_image=as_image)
    if rows := _figure_rows(facts):
        yield _Section("Steps and memory", indented(rows), live_html.html_table(rows))
    has_ranks = len(facts.ranks) > 1
    warnings = []
    for seen in facts.warnings:
        ranks = f", rank {number_ranges(seen.ranks)}" if has_ranks else ""
        warnings.append(f"{seen.text} ({count_noun(seen.count, 'time')}{ranks})")
    yield _list_section("Warnings", warnings)
    plan = [f"  {line}".rstrip() for line in facts.plan.text.split("\n")]
    yield _Section("Plan", plan, live_html.lines_block(facts.plan.text, scrolls=False))
    yield _list_section("How it was measured", facts.notes)


def _list_section(heading: str, items: Sequence[str]) -> _Section:
    entries = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    drawn = f'<ul style="margin:0;padding-left:1.4em">{entries}</ul>' if items else ""
    return _Section(heading, [f"  - {item}" for item in items], drawn)


def _time_section(facts: RunFacts) -> _Section:
    ranks = facts.timed_ranks
    if not ranks:
        words = "No loop over batches was seen."
        return _Section("Time by rank", [f"  {words}"], f"<div>{live_html.quiet(words)}</div>")
    slowest = slowest_sentence(facts.slowest, ranks) if len(ranks) > 1 else ""
    left_out = starting_sentence(ranks)
    rows = [["rank", *TIME_KINDS, "together"]]
    for rank, times in ranks.items():
        cells = [
            f"{format_seconds(part_s)} ({percent_of(part_s, times.steady_s)})"
            for part_s in times.parts.values()
        ]
        rows.append([str(rank), *cells, format_seconds(times.steady_s)])
    return _Section(
        "Time by rank",
        [*indented(rows), *(f"  {words}" for words in (slowest, left_out) if words)],
        f"<div>{html.escape(slowest)}</div>{live_html.rank_times_html(ranks)}{live_html.html_table(rows)}"
        + (f"<div>{live_html.quiet(left_out)}</div>" if left_out else ""),
    )


def _curve_section(facts: RunFacts, names: Sequence[str], *, as_image: bool) -> _Section:
    rows = []
    for name in facts.metric_names:
        points = next(iter(facts.curves[name].values()))
        rows.append([name, sparkline([y for _, y in points]), from_to(points)])
    charts = "".join(_chart(facts, name, as_image=as_image) for name in names[:_MOST_CHARTS])
    more = f"<div>{live_html.quiet(', '.join(names[_MOST_CHARTS:]))}</div>"
    drawn = f'<div style="{_CHARTS_STYLE}">{charts}</div>{more}' if charts else ""
    return _Section("Curves", indented(rows), drawn)


def _chart(facts: RunFacts, name: str, *, as_image: bool) -> str:
    chart = metric_chart(facts.curves[name], name, facts.marks, as_image=as_image)
    return live_html.titled(name, chart)


def from_to(points: Sequence[tuple[float, float]] | None) -> str:
    """`2.3 → 0.4`: the first and the last value of a curve."""
    return f"{format_number(points[0][1])} → {format_number(points[-1][1])}" if points else "-"


_FIGURE_COLUMNS: dict[str, Callable[[RankFigures], str]] = {
    "state": lambda figures: figures.state,
    "progress": lambda figures: figures.progress,
    "steps": lambda figures: f"{figures.steps:,}" if figures.steps else "",
    "steps/s": lambda figures: live_html.rate_text(figures.steps_per_s),
    "samples": lambda figures: f"{figures.samples:,}" if figures.samples else "",
    "samples/s": lambda figures: live_html.rate_text(figures.samples_per_s),
    "most host memory": lambda figures: _size(figures.peak_host_bytes),
    "most device memory": lambda figures: _size(figures.peak_device_bytes),
}


def _size(num_bytes: int | None) -> str:
    return format_bytes(num_bytes) if num_bytes else ""


def _figure_rows(facts: RunFacts) -> list[list[str]]:
    columns = {"rank": [str(figures.rank) for figures in facts.ranks]}
    for name, text_of in _FIGURE_COLUMNS.items():
        columns[name] = [plain_text(text_of(one), 2 * live_html.LABEL_CHARS) for one in facts.ranks]
    for name in facts.metric_names[:1]:
        cells = [from_to(facts.curves[name].get(figures.rank)) for figures in facts.ranks]
        columns[plain_text(name, live_html.LABEL_CHARS)] = cells
    rows = live_html.filled_columns(columns)
    return rows if len(rows[0]) > 1 else []


def indented(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def _part_html(facts: RunFacts, above: str, names: Sequence[str], *, as_image: bool = True) -> str:
    sections = "".join(
        # No heading element: the outline of a notebook would list it.
        f'<div role="heading" aria-level="2" style="{_HEADING_STYLE}">{section.heading}</div>'
        f"{section.html}"
        for section in _sections(facts, names, as_image=as_image)
        if section.html
    )
    return f'<div style="{_PART_STYLE}">{above}{sections}</div>'


def report_document(facts: RunFacts) -> str:
    """A whole HTML file that needs nothing beside it."""
    title = html.escape(title_of(facts))
    advice = live_html.advice_html(facts.advice)
    began = facts.began.replace("T", " ").replace("+00:00", " UTC")
    origin = live_html.quiet(f"Began {began} · nbaccel {facts.nbaccel_version}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>{html.escape(' · '.join(_finished_parts(facts)))}</p>\n"
        f"{_part_html(facts, advice, facts.metric_names, as_image=False)}\n"
        f'<p style="font-size:13px">{origin}</p>\n</body>\n</html>\n'
    )


def summary_html(board: RunBoard, facts: RunFacts) -> str:
    """What stays of a run in its cell: one line that unfolds to the report, and the chart."""
    words = html.escape(" · ".join(_finished_parts(facts)))
    headline = f"{_SIGNS[facts.ending]} <b>{count_noun(len(facts.ranks), 'rank')}</b> · {words}"
    names = facts.metric_names
    report = _part_html(facts, "", names[1:]) + live_html.printed_html(board)
    charts = "".join(_chart(facts, name, as_image=True) for name in names[:1])
    return (
        f'<div style="{live_html.PANEL_STYLE}"><details>'
        f'<summary style="{live_html.SUMMARY_STYLE}">{headline}</summary>'
        # In sight, and not only in the report.
        f"{report}</details>{live_html.advice_html(facts.advice)}{charts}</div>"
    )


def report_of(
    board: RunBoard | None, source: str, path: str | os.PathLike[str] | None = None
) -> RunReport:
    """The report of a run, which is also saved where a path is given."""
    if board is None or board.plan is None:
        raise ConfigError(
            f"{source} has nothing to report: no run was watched for it. Call report() of what "
            "notebook_launcher returned, or of a pool in which a cell or a call has run."
        )
    report = RunReport(facts_of(board, board.plan))
    if path is not None:
        report.save(path)
    return report


class RunReport:
    """Curves, time by rank, memory, warnings and the plan of a finished run.

    As the last line of a cell it shows itself; `print(report)` writes it for a terminal.

    Examples:
        >>> report = results.report()
        >>> report.save("run.html")
        >>> report.to_dict()["slowest"]
        {'rank': 1, 'waited_s': 4.2, 'waited_share': 0.12}
    """

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts

    def to_dict(self) -> dict[str, Any]:
        """The report in plain containers, which `json.dumps` takes."""
        document: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION}
        document |= dataclasses.asdict(self.facts)
        document["marks"] = [{"step": step, "text": text} for step, text in self.facts.marks]
        document["curves"] = [
            {
                "name": name,
                "rank": rank,
                "steps": [step for step, _ in points],
                "values": [value for _, value in points],
            }
            for name, curves in self.facts.curves.items()
            for rank, points in curves.items()
        ]
        return {name: _as_plain(value) for name, value in document.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RunReport:
        """The report of what `to_dict` gave, as from a saved file."""
        kind = (document.get("format"), document.get("version"))
        if kind != (FORMAT_NAME, FORMAT_VERSION):
            raise ConfigError(
                f"This is no report that can be read: format and version are {kind[0]!r} and "
                f"{kind[1]!r}, not {FORMAT_NAME!r} and {FORMAT_VERSION}. Give what to_dict() gave."
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
            return cls(TypeAdapter(RunFacts).validate_json(json.dumps(plain), strict=True))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"This report cannot be read: {error}. It was changed, or is not whole: what it "
                "says would be shown as a page. Give what RunReport.to_dict returned."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it into one file, which appears whole or not at all."""
        target = Path(path).expanduser()
        suffix = target.suffix.lower()
        if suffix not in (".html", ".json"):
            raise ConfigError(
                f"report.save({str(path)!r}): the name must end with .html or .json, which says "
                f"what is written. Give for example {str(target.with_suffix('.html'))!r}."
            )
        if not target.parent.is_dir():
            raise ConfigError(
                f"report.save({str(path)!r}): the folder {str(target.parent)!r} does not exist, so "
                "nothing was written. Create it, or give another path."
            )
        text = report_document(self.facts)
        if suffix == ".json":
            text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        atomic.write_text(target, text)
        return target

    def _repr_html_(self) -> str:
        facts = self.facts
        parts = live_html.quiet(" · ".join(_finished_parts(facts)))
        headline = f"<div><b>{html.escape(title_of(facts))}</b> {parts}</div>"
        return _part_html(facts, headline + live_html.advice_html(facts.advice), facts.metric_names)

    def __str__(self) -> str:
        lines = [f"{title_of(self.facts)} · {' · '.join(_finished_parts(self.facts))}"]
        lines += [f"! {sentence}" for sentence in self.facts.advice]
        for section in _sections(self.facts, (), as_image=False):
            if section.lines:
                lines += ["", section.heading, *section.lines]
        return "\n".join(lines)

    __repr__ = __str__


_NAME_CHARS = 24


def compare(*runs: Any) -> RunComparison:
    """Lay runs side by side: their figures in a table, and their curves in common charts.

    Args:
        *runs: Results of launches, reports, or paths of reports that were saved as JSON.

    Returns:
        It shows itself as the last line of a cell; `print` writes it for a terminal.

    Raises:
        ConfigError: Fewer than two are given, or something else.

    Examples:
        >>> one = notebook_launcher(train, (model,), num_processes=1)
        >>> two = notebook_launcher(train, (model,), num_processes=2)
        >>> nbaccel.compare(one, two)
    """
    if len(runs) < 2:
        raise ConfigError(
            f"compare() got {len(runs)}: two runs or more can be laid side by side. Give the "
            "results of launches, their reports, or paths of saved ones."
        )
    return RunComparison([_facts_of(run) for run in runs])


def _facts_of(run: Any) -> RunFacts:
    if isinstance(run, (str, os.PathLike)):
        try:
            document = json.loads(Path(run).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"compare({shown(str(run))}): it cannot be read as a report: {error}. Give the "
                'path of what report.save("run.json") has written.'
            ) from error
        return RunReport.from_dict(document).facts
    report = run if isinstance(run, RunReport) else getattr(run, "report", lambda: None)()
    if not isinstance(report, RunReport):
        raise ConfigError(
            f"compare() got {shown(run)}, which has no report. Give what notebook_launcher "
            "returned, a report, or the path of a saved one."
        )
    return report.facts


class RunComparison:
    """Runs side by side.

    Attributes:
        facts: Of each run, in the order in which they were given.
    """

    def __init__(self, facts: Sequence[RunFacts]) -> None:
        self.facts = list(facts)
        names = dict.fromkeys(name for facts in self.facts for name in facts.metric_names)
        self._curves = {
            name: [mean_points(facts.curves.get(name, {}).values()) for facts in self.facts]
            for name in names
        }

    def _rows(self) -> list[list[str]]:
        cells = {label: [tell(facts) for facts in self.facts] for label, tell in _ROWS.items()}
        cells |= {name: [from_to(points) for points in runs] for name, runs in self._curves.items()}
        rows = [["", *(f"{number}" for number, _ in enumerate(self.facts, 1))]]
        for label, texts in cells.items():
            if any(text not in ("", "-") for text in texts):
                rows.append([plain_text(label, _NAME_CHARS), *(text or "-" for text in texts)])
        return rows

    def _charts(self) -> str:
        charts = ""
        for name, runs in self._curves.items():
            lines = [
                ChartLine(f"{number}: {plain_text(title_of(facts), _NAME_CHARS)}", points)
                for number, (facts, points) in enumerate(zip(self.facts, runs, strict=True), 1)
                if points
            ]
            if len(lines) > 1:
                charts += live_html.titled(name, chart_of(lines, name, as_image=True))
        return charts

    def _repr_html_(self) -> str:
        return f"<div>{live_html.html_table(self._rows())}{self._charts()}</div>"

    def __str__(self) -> str:
        return "\n".join(indented(self._rows()))

    __repr__ = __str__


def _share(kind: str, facts: RunFacts) -> str:
    total_s = sum(times.steady_s for times in facts.timed_ranks.values())
    spent_s = sum(times.parts[kind] for times in facts.timed_ranks.values())
    return percent_of(spent_s, total_s) if total_s else ""


_ROWS: dict[str, Callable[[RunFacts], str]] = {
    "run": title_of,
    "plan": lambda facts: facts.plan.headline,
    "began": lambda facts: facts.began.replace("T", " ").removesuffix("+00:00"),
    "ending": lambda facts: facts.ending or "done",
    "took": lambda facts: format_seconds(facts.seconds),
    "steps": lambda facts: (
        f"{steps:,}" if (steps := max((one.steps or 0 for one in facts.ranks), default=0)) else ""
    ),
    "steps/s": lambda facts: next(
        filter(None, (live_html.rate_text(one.steps_per_s) for one in facts.ranks)), ""
    ),
    "samples/s": lambda facts: live_html.rate_text(facts.samples_per_s),
    **{kind: functools.partial(_share, kind) for kind in TIME_KINDS},
    "most host memory": lambda facts: most_bytes(facts, "peak_host_bytes"),
    "most device memory": lambda facts: most_bytes(facts, "peak_device_bytes"),
}
