"""Estimates of memory beside what DeepSpeed's real engines hold, and what the system counts.

    python benchmarks/zero_memory.py               every configuration, about eight minutes
    python benchmarks/zero_memory.py --render      the table again, from the stored result
    python benchmarks/zero_memory.py --check       exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # the engines are those of the tests

from harness.host_memory import TRAININGS, counted  # noqa: E402
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
MOST_OF_COUNTED = 1.15
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
    results.forget("host memory")
    for training in TRAININGS:
        say(training.name)
        for how, short in (("short", True), ("plentiful", False)):
            found = counted(training, short=short)
            for who, size in found.items():
                results.of(f"host memory {how}: {training.name}", who).values.append(size)
    results.note("host memory")
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


def host_share(results: Results, how: str, name: str) -> float:
    row = f"host memory {how}: {name}"
    return (results.median(row, "estimated") or 0.0) / (results.median(row, "counted") or 1.0)


def render_host(results: Results) -> tuple[str, bool]:
    """What the system counts: where memory is short, to the bar; where it is not, as it comes."""
    lines = [
        "| training | counted, MiB | estimated | ratio | bar | counted where memory is plentiful "
        "| ratio |",
        "| --- | --: | --: | --: | --- | --: | --: |",
    ]
    holds = True
    for name in (one.name for one in TRAININGS):
        share = host_share(results, "short", name)
        good = 1 - WITHIN <= share <= MOST_OF_COUNTED
        holds &= good
        row = f"host memory short: {name}"
        sizes = [results.median(row, who) or 0.0 for who in ("counted", "estimated")]
        kept = results.median(f"host memory plentiful: {name}", "counted") or 0.0
        cells = [name, *(f"{size / 2**20:,.0f}" for size in sizes), f"{share:.3f}", verdict(good)]
        cells += [f"{kept / 2**20:,.0f}", f"{host_share(results, 'plentiful', name):.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    facts = results.sections["host memory"]
    lines += [
        "",
        f"Bar: not below {1 - WITHIN:.2f} of what is counted, and not above {MOST_OF_COUNTED:.2f}. "
        f"Taken {facts['taken']}.",
    ]
    return "\n".join(lines), holds


def render_both(results: Results) -> tuple[str, bool]:
    engines, held = render(results)
    hosts, counts = render_host(results)
    return f"{engines}\n\n{hosts}", held and counts


REPORT = Report("zero_memory", render_both, mark="zero_memory")


def main() -> int:
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
