"""The table of the README: nbaccel's launcher beside Accelerate's, in words and in ratios."""

from __future__ import annotations

import statistics

from harness.samples import Results
from harness.subjects import PEER

BEGIN, END = "<!-- beside_accelerate:begin -->", "<!-- beside_accelerate:end -->"
OURS = "nbaccel-template"

# What each launcher does. Tests hold nbaccel's column; Accelerate's is read from its source.
WORDS = (
    ("the call returns", "`None`", "each rank's return value"),
    ("the notebook's model afterwards", "untrained", "trained; as it was, if the launch failed"),
    ("an `Accelerator` was made in an earlier cell", "`ValueError`: restart the notebook", "works"),
    ("workers that stay for the next cell", "no", "`%%accelerate`"),
)
TIMES = (
    ("a first launch, of a function that does nothing", "a noop first fresh"),
    ("a later launch that takes one DDP step with AdamW", "a adamw later fresh"),
    (
        "the first launch with a model of 1 GiB, which is moved to shared memory",
        "a model first fresh",
    ),
    ("a later launch with it", "a model later fresh"),
    ("interrupting workers that wait in a receive", "d receive"),
    ("a worker killed by SIGKILL, until the cell ends", "e killed"),
    ("a worker raises, until the cell ends", "f error"),
)


def render(results: Results) -> str:
    """The table, and what it was taken with.

    Args:
        results: What `benchmarks/launch.py` has stored, sections (a), (b), (d), (e) and (f).
    """
    rows = [*WORDS, *(_time(results, label, measure) for label, measure in TIMES)]
    rows.append(_memory(results))
    rows.append(_report(results, "e killed", "was killed"))
    versions = results.sections["a"]["versions"]
    head = ["", f"Accelerate {versions['accelerate']}", "nbaccel"]
    lines = [head, ["---"] * 3, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _time(results: Results, label: str, measure: str) -> tuple[str, str, str]:
    ours, theirs = results.median(measure, OURS), results.median(measure, PEER)
    if ours is None or theirs is None:
        raise ValueError(f"{results.path.name} has no {measure!r} of {OURS} and {PEER}")
    return label, f"{theirs:.2f} s", f"{ours / theirs:.2f}x"


def _memory(results: Results) -> tuple[str, str, str]:
    ours, theirs = results.median("b 4 whole", OURS), results.median("b 4 whole", PEER)
    if ours is None or theirs is None:
        raise ValueError(f"{results.path.name} has no memory of {OURS} and {PEER}")
    label = "memory of the notebook and 4 workers with that model"
    return label, f"{theirs:.0f} MiB", f"{ours / theirs:.2f}x"


def _report(results: Results, measure: str, event: str) -> tuple[str, str, str]:
    """How long the report of a failure is, and whether it names the rank that failed first."""
    cells = []
    for name in (PEER, OURS):
        facts = results.of(measure, name).facts
        lines = statistics.median(fact["num_lines"] for fact in facts)
        right = all(fact["blamed_rank"] == 1 for fact in facts)
        named = "names the rank" if right else "does not name the rank"
        cells.append(f"{lines:.0f} lines, {named}")
    return f"the report on a worker that {event}", cells[0], cells[1]
