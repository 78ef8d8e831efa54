"""nbaccel on GPUs: launches beside a live context, steps, memory, what Stop and a kill leave.

    python benchmarks/gpu.py                       everything, some ten minutes on one GPU
    python benchmarks/gpu.py --only steps          some of it
    python benchmarks/gpu.py --render              the tables again, from the stored result
    python benchmarks/gpu.py --device cpu --small --no-page --output /tmp/gpu.json    is it sound?

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.gpu import (
    MIB,
    Case,
    EndWhenHeld,
    Size,
    cases,
    free_bytes,
    hold,
    measure,
    touch,
    touch_spawned,
)
from harness.report import Report, versions
from harness.samples import Results, say

SMALL = Size(width=64, layers=2, batch=4, steps=2, rounds=1)
SECTIONS = ("launch", "steps", "endings")
GIVEN_BACK_S = 30.0
NOISE_BYTES = 64 * MIB


# ------------------------------------------------------------------------- taking the figures


def launches(results: Results, size: Size, device: str) -> None:
    """Launches of one worker per GPU, with the model on the host and on the device."""
    from nbaccel import notebook_launcher

    results.forget("launch")
    wake(device)
    count = _count(device)
    for where in dict.fromkeys(("cpu", device)):
        model = size.model().to(where)

        def ours(model: Any = model) -> None:
            notebook_launcher(touch, (model,), count, start_method="template")

        def spawn(model: Any = model) -> None:
            torch.multiprocessing.spawn(touch_spawned, (model,), nprocs=count)

        for who, launch in (("nbaccel", ours), ("spawn", spawn)):
            launch()  # the first one starts the template process, or fills the disk's cache
            for _ in range(size.rounds):
                results.of(f"launch model on {where}", who).values.append(_seconds(launch))
    results.note("launch", **_hardware(device), count=count)
    results.save()


def steps(results: Results, size: Size, device: str) -> None:
    """All ways to train in all precisions, and the memory they take."""
    from nbaccel import estimate_memory, notebook_launcher
    from nbaccel.errors import NbaccelError

    results.forget("steps")
    count = _count(device)
    results.note("steps", **_hardware(device), count=count, **vars(size))
    for case in cases():
        say(case.name)
        try:
            model = size.model()
            found = notebook_launcher(
                measure, (model, case, size, device), count, start_method="template", timeout=500
            )[0]
        except NbaccelError as error:
            results.of(f"steps {case.name}", "nbaccel").errors.append(str(error)[:600])
            continue
        for who, row in found.items():
            results.of(f"steps {case.name}", who).values += row["rates"]
            results.of(f"steps peak of {case.name}", who).values.append(row["peak"])
            results.of(f"steps loss of {case.name}", who).values.append(row["loss"])
        config = case.zero_config(size.batch, count)
        if config or case == Case("DDP", "no"):  # nothing else is what the estimate is made for
            needs = estimate_memory(model, config, num_processes=count, sample_batch=size.data()[0])
            results.of(f"steps peak of {case.name}", "estimate").values.append(needs.device.peak)
        # Of a machine that is lent, what there is so far may be all.
        results.save()


def endings(results: Results, size: Size, device: str) -> None:
    """Stop, and the kill of a worker, while workers hold memory on the device."""
    from nbaccel import notebook_launcher
    from nbaccel.errors import NbaccelError

    results.forget("endings")
    wake(device)
    for how in ("Stop", "kill"):
        for _ in range(size.rounds):
            before = free_bytes()
            with tempfile.TemporaryDirectory() as folder:
                # Stop reaches this thread; it must not come while the thread is joined.
                with (
                    EndWhenHeld(Path(folder), how) as ending,
                    contextlib.suppress(KeyboardInterrupt, NbaccelError),
                ):
                    notebook_launcher(hold, (folder, device), 2, start_method="template")
                prompt = time.monotonic() - ending.at
            back = _given_back(before, ending.at)
            results.of(f"endings {how}", "prompt").values.append(prompt)
            results.of(f"endings {how}", "memory given back").values.append(back)
    results.note("endings", **_hardware(device))
    results.save()


def wake(device: str) -> None:
    """What cells do before a launch: a tensor on the device, a product, a backward."""
    a = torch.randn(256, 256, device=device, requires_grad=True)
    (a @ a).sum().backward()


def _count(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 1


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _given_back(before: list[int], since: float) -> float:
    """Seconds until the driver has all memory back, or infinity."""
    while time.monotonic() < since + GIVEN_BACK_S:
        if all(b - a < NOISE_BYTES for b, a in zip(before, free_bytes(), strict=True)):
            return time.monotonic() - since
        time.sleep(0.05)
    return float("inf")


def _hardware(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    return {"gpu": name, "cuda": torch.version.cuda}


# ------------------------------------------------------------------------- the tables


def render(results: Results) -> tuple[str, bool]:
    parts = {"launch": _launch_table, "steps": _steps_table, "endings": _endings_table}
    tables = [make(results) for name, make in parts.items() if name in results.sections]
    if not tables:
        return "Nothing has been measured on a GPU yet.", True
    return "\n\n".join(tables), True


def _launch_table(results: Results) -> str:
    lines = [
        "| a launch beside a live CUDA context, s | nbaccel | `torch.multiprocessing.spawn` |",
        "| --- | --: | --: |",
    ]
    for measure_ in (m for m, who in results.samples if m.startswith("launch") and who == "spawn"):
        ours, theirs = (results.median(measure_, who) or 0.0 for who in ("nbaccel", "spawn"))
        row = f"{ours:.2f} ({ours / theirs:.2f}x) | {theirs:.2f}"
        lines.append(f"| {measure_.removeprefix('launch ')} | {row} |")
    return "\n".join([*lines, "", _taken(results, "launch")])


def _steps_table(results: Results) -> str:
    lines = [
        "| | steps/s | by hand | most memory, MiB | by hand | estimated | estimated / measured |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for case in cases():
        peak = f"steps peak of {case.name}"
        ours, theirs = (results.median(f"steps {case.name}", w) for w in ("nbaccel", "by hand"))
        if ours is None or theirs is None:
            samples = results.get(f"steps {case.name}", "nbaccel")
            why = samples.errors[0].splitlines()[0] if samples and samples.errors else "not run"
            lines.append(f"| {case.name} | {why} | | | | | |")
            continue
        held, by_hand = (results.median(peak, who) or 0.0 for who in ("nbaccel", "by hand"))
        needs = results.median(peak, "estimate")
        cells = [f"{ours:.1f} ({ours / theirs:.2f}x)", f"{theirs:.1f}"]
        cells += [f"{held / MIB:,.0f}", f"{by_hand / MIB:,.0f}"]
        cells += [f"{needs / MIB:,.0f}" if needs else "", _ratio(needs, held)]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _taken(results, "steps")])


def _endings_table(results: Results) -> str:
    lines = ["| | to the prompt, s | device's memory given back, s |", "| --- | --: | --: |"]
    for how in ("Stop", "kill"):
        found = (
            results.median(f"endings {how}", what) or 0.0
            for what in ("prompt", "memory given back")
        )
        lines.append(f"| {how} | {' | '.join(f'{value:.2f}' for value in found)} |")
    return "\n".join([*lines, "", _taken(results, "endings")])


def _ratio(needs: float | None, held: float) -> str:
    return f"{needs / held:.2f}" if needs and held else ""


def _taken(results: Results, section: str) -> str:
    facts = results.sections[section]
    count = f", {facts['count']} process(es)" if "count" in facts else ""
    return (
        f"{facts['gpu']}{count}, CUDA {facts['cuda']}. Taken {facts['taken']}; {versions(facts)}."
    )


REPORT = Report("gpu", render, mark="gpu")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a model of some kilobytes")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parser.parse_args()
    if options.device == "cuda" and not (options.render or torch.cuda.is_available()):
        parser.error(
            "torch finds no GPU here. Only --device cpu --small runs, to see if it is sound."
        )

    def take(results: Results) -> None:
        size = SMALL if options.small else Size()
        made = {"launch": launches, "steps": steps, "endings": endings}
        for name in options.only:
            say(name)
            made[name](results, size, options.device)

    return REPORT.run(options, take)


if __name__ == "__main__":
    sys.exit(main())
