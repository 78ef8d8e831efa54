"""A choice in the picker of a 7B-parameter model: how long until all is redrawn.

    python benchmarks/pickers.py               every choice, under a minute
    python benchmarks/pickers.py --render      the table again, from the stored result
    python benchmarks/pickers.py --check       exit status 1 when a bar does not hold

Read docs/pages/benchmarks.md for what each row means.
"""

from __future__ import annotations

import sys

from harness.pickers import Form
from harness.report import Report, verdict, versions
from harness.samples import Results, say

# What is pressed, in this order: each from the state that the one before has left.
CHOICES = (
    ("bf16", "mixed_precision", "bf16"),
    ("ZeRO-1", "zero_stage", "1"),
    ("ZeRO-3", "zero_stage", "3"),
    ("optimizer state on the device", "zero_optimization-offload_optimizer-device", "none"),
    ("optimizer state on the CPU", "zero_optimization-offload_optimizer-device", "cpu"),
    ("parameters on the CPU", "zero_optimization-offload_param-device", "cpu"),
    ("ZeRO-2", "zero_stage", "2"),
    ("ZeRO off", "zero_stage", "none"),
    ("fp32", "mixed_precision", "no"),
)
ROUNDS = 5
BAR_MS = 50.0


def measure(results: Results) -> None:
    results.forget("pickers")
    with Form() as form:
        say(f"a form of {form.num_widgets} widgets, shown in {form.shown_s:.2f} s")
        results.of("pickers shown", "nbaccel").values.append(form.shown_s)
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            for name, setting, option in CHOICES:
                took = form.press(setting, option)
                row = results.of(f"pickers {name}", "nbaccel")
                row.values.append(took.kernel_ms)
                row.facts.append({"messages": took.num_messages, "kb": took.num_bytes / 1000})
                results.of(f"pickers {name}", "and back").values.append(took.client_ms)
        results.note("pickers", parameters=form.num_parameters, widgets=form.num_widgets)
    results.save()


def render(results: Results) -> tuple[str, bool]:
    facts = results.sections["pickers"]
    lines = [
        "| choice | in the kernel, ms (most) | and back, ms | messages | kB | bar |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    holds = True
    for name, *_ in CHOICES:
        row, back = (results.of(f"pickers {name}", who) for who in ("nbaccel", "and back"))
        good = row.median is not None and row.median <= BAR_MS
        holds &= good
        sent = [max(fact[what] for fact in row.facts) for what in ("messages", "kb")]
        cells = [name, f"{row.median:.1f} ({max(row.values):.1f})", f"{back.median:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {sent[0]} | {sent[1]:.1f} | {verdict(good)} |")
    shown = results.median("pickers shown", "nbaccel") or 0.0
    lines += [
        "",
        f"Bar: at most {BAR_MS:.0f} ms in the kernel, the median of {ROUNDS}. "
        f"{facts['parameters'] / 1e9:.2f} billion parameters, {facts['widgets']} widgets, "
        f"made and shown in {shown:.2f} s. Load {facts['load']}. Taken {facts['taken']}; "
        + versions(facts, ("python", "torch", "deepspeed", "ipykernel"))
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("pickers", render, mark="pickers")


def main() -> int:
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
