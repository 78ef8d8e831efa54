"""What benchmarks with bars of their own do alike: options, the table, its place, the status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.samples import Results, say
from harness.table import put_into

BENCHMARKS = Path(__file__).resolve().parents[1]
PAGES = BENCHMARKS.parent / "docs" / "pages"


@dataclass(frozen=True)
class Report:
    """One benchmark's table.

    `render` gives the text, and whether all bars hold; `mark` is the name of the place in `page`
    where the text belongs.
    """

    name: str
    render: Callable[[Results], tuple[str, bool]]
    mark: str
    page: Path = PAGES / "figures.md"

    @property
    def begin(self) -> str:
        return f"<!-- {self.mark}:begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.mark}:end -->"

    def parser(self, doc: str | None) -> argparse.ArgumentParser:
        """Options that all have; a benchmark adds its own."""
        parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
        stored = BENCHMARKS / "results" / f"{self.name}.json"
        parser.add_argument("--output", type=Path, default=stored)
        told = f"leave {self.page.name} as it is"
        parser.add_argument("--no-page", action="store_true", help=told)
        parser.add_argument("--render", action="store_true", help="measure nothing")
        parser.add_argument("--check", action="store_true", help="fail when a bar does not hold")
        return parser

    def run(self, options: argparse.Namespace, measure: Callable[[Results], None]) -> int:
        """Measure, unless told not to; print the table and put it in its place.

        Interrupted, it prints the table of what was measured, which is no table for a page.
        """
        results = Results(options.output)
        was_interrupted = False
        if not options.render:
            try:
                measure(results)
            except KeyboardInterrupt:
                was_interrupted = True
                say("interrupted: this is what there is")
        text, holds = self.render(results)
        print(text)
        if not options.no_page and not was_interrupted:
            put_into(self.page, text, self.begin, self.end)
        return 1 if was_interrupted or (options.check and not holds) else 0


def verdict(holds: bool) -> str:
    return "pass" if holds else "**FAIL**"


def versions(facts: dict[str, Any], only: Iterable[str] = ()) -> str:
    """Packages with which figures were taken; all that are known, or these as far as they are."""
    known = facts["versions"]
    return ", ".join(f"{name} {known[name]}" for name in only or known if name in known)
