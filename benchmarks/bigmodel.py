"""Models bigger than memory, beside Accelerate: loading, peak memory, forwards from disk, tokens.

    python benchmarks/bigmodel.py             everything, some ten minutes and 15 GB of disk
    python benchmarks/bigmodel.py --render    the table again, from the stored result
    python benchmarks/bigmodel.py --check     exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from harness import bigmodel  # noqa: E402
from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402

OURS, PEER = bigmodel.OURS, bigmodel.PEER
ROUNDS = 3
GIB = 2**30


def measure(results: Results) -> None:
    results.forget("bigmodel")
    with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
        say("writing the checkpoints")
        bigmodel.run_task("make", OURS, Path(folder))
        for number in range(ROUNDS):
            for task, names in bigmodel.TASKS.items():
                # In turn, and each round the other way round: what one leaves in the system's
                # cache may help or harm the next.
                for name in names[:: 1 if number % 2 == 0 else -1]:
                    say(f"round {number + 1} of {ROUNDS}: {task}, {name}")
                    for row, value in bigmodel.run_task(task, name, Path(folder)).items():
                        results.of(f"bigmodel {row}", name).values.append(value)
    results.note(
        "bigmodel",
        rounds=ROUNDS,
        checkpoint_bytes=bigmodel.CHECKPOINT_BYTES,
        generate_bytes=bigmodel.generate_bytes(),
        limit_bytes=bigmodel.limit_bytes(),
    )
    results.save()


# ---------------------------------------------------------------- the table
def render(results: Results) -> tuple[str, bool]:
    lines = [f"| | {PEER} | {OURS} | compared | bar |", "| --- | --: | --: | --: | --- |"]
    holds = True
    for row in bigmodel.ROWS:
        theirs = results.median(f"bigmodel {row.measure}", row.peer)
        ours = results.median(f"bigmodel {row.measure}", row.ours)
        if ours is None or theirs is None:
            raise ValueError(f"{results.path.name} has no {row.measure!r}")
        value = row.compare(ours, theirs)
        good = row.holds(value)
        holds &= good
        lines.append(
            f"| {row.title} | {row.show(theirs)} | {row.show(ours)} | {value:.2f}x | "
            f"{verdict(good) if row.has_bar else ''} |"
        )
    facts = results.sections["bigmodel"]
    bars = "; ".join(row.told for row in bigmodel.ROWS if row.told)
    lines += [
        "",
        f"Bars: {bars}. Medians of {facts['rounds']} rounds, each in fresh processes; a checkpoint "
        f"of {facts['checkpoint_bytes'] / GIB:.1f} GiB, and for `generate` one of "
        f"{facts['generate_bytes'] / GIB:.1f} GiB in a control group of "
        f"{facts['limit_bytes'] / GIB:.1f} GiB. Load {facts['load']}. Taken {facts['taken']}; "
        + versions(facts, ("python", "torch", "accelerate"))
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("bigmodel", render, mark="bigmodel")


def main() -> int:
    if sys.argv[1:2] == ["--task"]:
        task, name, folder = sys.argv[2:5]
        print(json.dumps(bigmodel.perform(task, name, Path(folder))))
        return 0
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
