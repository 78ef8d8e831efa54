"""What workers print, on its way into the cell: Stop in a flood of lines, long lines, many lines.

    python benchmarks/output.py               everything, two minutes
    python benchmarks/output.py --render      the table again, from the stored result
    python benchmarks/output.py --check       exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.report import Report, verdict, versions
from harness.samples import Results, say
from harness.storms import PLAIN, WAYS, Kernel, Way

ROUNDS = 3
STORM_S = 4.0
STORM = "import itertools\nfor i in itertools.count():\n    print(i, 'line of', rank)"
FAILING = (
    "until = time.monotonic() + 3\n"
    "while time.monotonic() < until or rank:\n    print(time.monotonic(), 'line of', rank)\n"
    "raise ValueError(repr(time.monotonic()))"
)
LINES = 200_000


@dataclass(frozen=True)
class Row:
    """A measure, and the most it may be: as such, and in times of the plain kernel's."""

    name: str
    unit: str
    measure: Callable[[Kernel, Way], float]
    most: float | None = None
    ratio: float | None = None


def stop_in_a_storm(kernel: Kernel, way: Way) -> float:
    return kernel.run(way.cell(STORM), stop_after_s=STORM_S).seconds


def failure_in_a_storm(kernel: Kernel, way: Way) -> float:
    """From the moment at which rank 0 raises, by the clock that all processes have."""
    error = kernel.run(way.cell(FAILING)).error
    raised = re.findall(r"ValueError(?:\x1b\[[\d;]*m)?: (\d+\.\d+)", error)
    return time.monotonic() - float(raised[-1])


def long_line(kernel: Kernel, way: Way) -> float:
    return kernel.run(way.cell("print('x' * 20_000_000)")).seconds


def many_lines(kernel: Kernel, way: Way) -> float:
    each = LINES // way.num_ranks
    took = kernel.run(way.cell(f"for i in range({each}): print(i, 'line of', rank)"))
    if took.lines < LINES:
        raise RuntimeError(f"only {took.lines} of {LINES} lines came: {took.error}")
    return took.seconds / LINES * 1e6


def long_message(kernel: Kernel, way: Way) -> float:
    return kernel.run(way.cell("raise ValueError('x' * 100_000_000)")).chars / 1e6


def memory_of_a_storm(kernel: Kernel, way: Way) -> float:
    before = kernel.resident_mib()
    kernel.run(way.cell(STORM), stop_after_s=STORM_S)
    return max(0.0, kernel.resident_mib() - before)


ROWS = (
    Row("Stop in a flood of lines, to the prompt", "s", stop_in_a_storm, most=1.0),
    Row("an error in a flood of lines, until it is told", "s", failure_in_a_storm, most=1.0),
    Row("a line of 20 MB", "s", long_line, ratio=2.0),
    Row(f"{LINES:,} lines, each", "µs", many_lines, ratio=2.0),
    Row("an error with a message of 100 MB, sent to the browser", "MB", long_message, most=0.1),
    Row("kernel's memory after a flood, more than before", "MiB", memory_of_a_storm, most=50.0),
)


def measure(results: Results) -> None:
    results.forget("output")
    with Kernel() as kernel:
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            for row in ROWS:
                for way in WAYS:
                    results.of(f"output {row.name}", way.name).values.append(
                        row.measure(kernel, way)
                    )
    results.note("output")
    results.save()


def render(results: Results) -> tuple[str, bool]:
    facts = results.sections["output"]
    names = [way.name if way is PLAIN else f"{way.name}, 2 ranks" for way in WAYS]
    lines = [f"| | {' | '.join(names)} | bar |", f"| --- |{' --: |' * len(WAYS)} --- |"]
    holds = True
    for row in ROWS:
        plain, *others = (results.median(f"output {row.name}", way.name) or 0.0 for way in WAYS)
        worst = max(others)
        good = (row.most is None or worst <= row.most) and (
            row.ratio is None or worst <= row.ratio * plain
        )
        holds &= good
        told = (f"{v:.3g}{_ratio(v, plain) if row.unit.endswith('s') else ''}" for v in others)
        cells = [f"{plain:.3g}", *told]
        lines.append(f"| {row.name}, {row.unit} | {' | '.join(cells)} | {verdict(good)} |")
    bars = "; ".join(f"{row.name}: {_bar(row)}" for row in ROWS)
    lines += [
        "",
        f"Bars: {bars}. Medians of {ROUNDS}; the ratio is to the cell of the kernel in the same "
        f"run. Load {facts['load']}. Taken {facts['taken']}; "
        + versions(facts, ("python", "torch", "ipykernel"))
        + ".",
    ]
    return "\n".join(lines), holds


def _ratio(value: float, plain: float) -> str:
    return f" ({value / plain:.2f}x)" if plain else ""


def _bar(row: Row) -> str:
    if row.most is not None:
        return f"at most {row.most:g} {row.unit}"
    return f"at most {row.ratio:g} times the kernel's"


REPORT = Report("output", render, mark="output")


def main() -> int:
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
