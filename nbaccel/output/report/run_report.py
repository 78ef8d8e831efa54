"""``RunReport``: what a finished run can tell of itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report.report_parts import report_document, report_lines, report_part
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
