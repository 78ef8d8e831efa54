"""FP8: losses beside float32, bytes per parameter, the exchange of gradients, and GPUs.

    python benchmarks/fp8.py                         loss, memory and exchange; half an hour
    python benchmarks/fp8.py --sections memory       some of it; `gpu` needs a GPU
    python benchmarks/fp8.py --quick --no-page --output /tmp/fp8.json    is it sound? two minutes
    python benchmarks/fp8.py --render                the tables again, from the stored result
    python benchmarks/fp8.py --check                 exit status 1 unless every bar holds

Read docs/pages/benchmarks.md for what each row means.
"""

from __future__ import annotations

import os
import statistics
import sys

# Before torch is imported: figures of one thread, whatever else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import fp8_training as training
from harness.report import Report, verdict, versions
from harness.samples import Results, say

SEEDS, STEPS = (0, 1, 2), 400
QUICK_SEEDS, QUICK_STEPS = (0, 1), 10
PACKAGES = ("python", "nbaccel", "torch", "torchao")


# ------------------------------------------------------------------------- losses


def losses(results: Results, *, quick: bool) -> None:
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if quick else (SEEDS, STEPS)
    results.forget("loss")
    for seed in seeds:
        for way in training.WAYS:
            say(f"seed {seed}: {way.name}")
            found = training.train_anywhere(way, seed, steps)
            results.of("loss", way.name).values.append(found["loss"])
            results.of("loss", way.name).facts.append({"cpu_ms": found["cpu_ms"]})
    results.note("loss", seeds=list(seeds), steps=steps)
    results.save()


def loss_table(results: Results) -> tuple[str, bool]:
    facts = results.sections["loss"]
    reference = results.of("loss", "fp32").values
    spread = max(reference) - min(reference)
    bf16_ms = _cpu_ms(results, "bf16")
    lines = [
        "| | validation loss, mean | of each seed | more than fp32 | CPU time of a step, to bf16's "
        "| bar |",
        "| --- | --: | --- | --: | --: | --- |",
    ]
    holds = True
    for way in training.WAYS:
        found = results.of("loss", way.name).values
        more = statistics.fmean(found) - statistics.fmean(reference)
        good = abs(more) <= spread
        holds &= good
        name = way.name + (f", {way.processes} processes" if way.processes > 1 else "")
        each = ", ".join(f"{loss:.4f}" for loss in found)
        cells = [name, f"{statistics.fmean(found):.4f}", each]
        cells += ["", f"{_cpu_ms(results, way.name) / bf16_ms:.1f}x", ""]
        if way.name != "fp32":
            cells[3], cells[5] = f"{more:+.4f}", verdict(good)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Bar: the mean is off fp32's by at most what fp32's seeds differ among themselves, "
        f"{spread:.4f}. {facts['steps']} steps. {_taken(results, 'loss')}",
    ]
    return "\n".join(lines), holds


def _cpu_ms(results: Results, name: str) -> float:
    return statistics.median(fact["cpu_ms"] for fact in results.of("loss", name).facts)


# ------------------------------------------------------------------------- all of it


MEASURED = {"loss": losses}
TABLES = {"loss": ("Losses", loss_table)}


def _taken(results: Results, section: str) -> str:
    facts = results.sections[section]
    return (
        f"Taken {facts['taken']}; load {facts['load']}; {facts['num_cores']} cores, "
        f"{facts['memory_gib']} GiB; {versions(facts, PACKAGES)}."
    )


def render(results: Results) -> tuple[str, bool]:
    parts, holds = [], True
    for name, (title, make) in TABLES.items():
        if name in results.sections:
            text, good = make(results)
            parts.append(f"**{title}**\n\n{text}")
            holds &= good
    return "\n\n".join(parts) or "Nothing has been measured yet.", holds


REPORT = Report("fp8", render, mark="fp8")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--quick", action="store_true", help="few steps, small tensors")
    options = parser.parse_args()

    def take(results: Results) -> None:
        for name in options.sections:
            MEASURED[name](results, quick=options.quick)

    return REPORT.run(options, take)


if __name__ == "__main__":
    sys.exit(main())
