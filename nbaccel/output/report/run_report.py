"""``RunReport``: what a finished run can tell of itself; and several runs side by side."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_seconds
from nbaccel.config.given_values import shown
from nbaccel.output.panel.curves import ChartLine, chart_of, mean_points
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.live_html import html_table, titled
from nbaccel.output.panel.rank_times import TIME_KINDS, percent_of
from nbaccel.output.panel.words import plain_text, rate_text
from nbaccel.output.report.report_parts import (
    from_to,
    indented,
    most_bytes,
    report_document,
    report_lines,
    report_part,
    title_of,
)
from nbaccel.output.report.run_facts import RunFacts, facts_as_json, facts_from_json, facts_of

if TYPE_CHECKING:
    from typing_extensions import Self


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
        return facts_as_json(self.facts)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """The report of what `to_dict` gave, as from a saved file."""
        return cls(facts_from_json(document))

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
        return report_part(self.facts)

    def __str__(self) -> str:
        return "\n".join(report_lines(self.facts))

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
        cells = {
            label: [text_of(facts) for facts in self.facts] for label, text_of in _ROWS.items()
        }
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
                charts += titled(name, chart_of(lines, name, as_image=True))
        return charts

    def _repr_html_(self) -> str:
        return f"<div>{html_table(self._rows())}{self._charts()}</div>"

    def __str__(self) -> str:
        return "\n".join(indented(self._rows()))

    __repr__ = __str__


def _share(kind: str, facts: RunFacts) -> str:
    """The share of time that ranks have spent so, in the mean."""
    total_s = sum(times.steady_s for times in facts.timed_ranks.values())
    spent_s = sum(times.parts[kind] for times in facts.timed_ranks.values())
    return percent_of(spent_s, total_s) if total_s else ""


def _steps(facts: RunFacts) -> str:
    steps = max((figures.steps or 0 for figures in facts.ranks), default=0)
    return f"{steps:,}" if steps else ""


def _steps_per_s(facts: RunFacts) -> str:
    rates = (figures.steps_per_s for figures in facts.ranks)
    return rate_text(next((rate for rate in rates if rate is not None), None))


_ROWS: dict[str, Callable[[RunFacts], str]] = {
    "run": title_of,
    "plan": lambda facts: facts.plan.headline,
    "began": lambda facts: facts.began.replace("T", " ").removesuffix("+00:00"),
    "ending": lambda facts: facts.ending or "done",
    "took": lambda facts: format_seconds(facts.seconds),
    "steps": _steps,
    "steps/s": _steps_per_s,
    "samples/s": lambda facts: rate_text(facts.samples_per_s),
    **{kind: functools.partial(_share, kind) for kind in TIME_KINDS},
    "most host memory": lambda facts: most_bytes(facts, "peak_host_bytes"),
    "most device memory": lambda facts: most_bytes(facts, "peak_device_bytes"),
}
