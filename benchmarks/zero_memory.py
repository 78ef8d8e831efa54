"""Estimates of memory beside what DeepSpeed's real engines hold.

    python benchmarks/zero_memory.py               every configuration, about three minutes
    python benchmarks/zero_memory.py --render      the table again, from the stored result
    python benchmarks/zero_memory.py --check       exit status 1 when a bar does not hold

Read benchmarks/README.md for what each row means.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # the engines are those of the tests

from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402 - the line above must come first
from harness.zero_memory import Case, estimated, measured  # noqa: E402

CASES = (
    Case(0, False, "none", 1),
    Case(0, True, "none", 2),
    Case(1, False, "none", 1),
    Case(1, True, "none", 2),
    Case(2, False, "none", 2),
    Case(2, True, "none", 1),
    Case(2, False, "cpu", 1),
    Case(2, True, "cpu", 2),
    Case(3, False, "none", 1),
    Case(3, True, "none", 2),
    Case(3, False, "cpu", 2),
    Case(3, True, "cpu", 1),
)
WITHIN = 0.05
LEAST_OF_PEAK = 0.95
KINDS = ("at the step", "peak")


def measure(results: Results) -> None:
    results.forget("memory")
    for case in CASES:
        say(case.name)
        took, needs = measured(case), estimated(case)
        for kind in KINDS:
            row = f"memory {kind}: {case.name}"
            results.of(row, "measured").values.append(max(one[kind] for one in took))
            results.of(row, "estimated").values.append(needs[kind])
    results.note("memory", width=256, layers=6)
    results.save()


def ratio(results: Results, kind: str, case: Case) -> float:
    row = f"memory {kind}: {case.name}"
    took = results.median(row, "measured") or 0.0
    return (results.median(row, "estimated") or 0.0) / took


def render(results: Results) -> tuple[str, bool]:
    lines = [
        "| configuration | at the step, KiB | estimated | ratio | peak, KiB | estimated | ratio "
        "| bars |",
        "| --- | --: | --: | --: | --: | --: | --: | --- |",
    ]
    holds = True
    for case in CASES:
        step, peak = (ratio(results, kind, case) for kind in KINDS)
        good = abs(step - 1) <= WITHIN and peak >= LEAST_OF_PEAK
        holds &= good
        cells = [case.name]
        for kind, found in zip(KINDS, (step, peak), strict=True):
            row = f"memory {kind}: {case.name}"
            sizes = (results.median(row, who) or 0.0 for who in ("measured", "estimated"))
            cells += [*(f"{size / 1024:,.0f}" for size in sizes), f"{found:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {verdict(good)} |")
    facts = results.sections["memory"]
    lines += [
        "",
        f"Bars: at the step within {WITHIN:.0%}; the peak never estimated below "
        f"{LEAST_OF_PEAK:.0%}. Bytes of one process. Taken {facts['taken']}; "
        + versions(facts)
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("zero_memory", render, mark="zero_memory")


def main() -> int:
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
