"""Steps per second of a prepared loop, beside raw torch and Accelerate; and `import nbaccel`.

    python benchmarks/step.py                      5 launches per row, about ten minutes
    python benchmarks/step.py --launches 2 --no-page --output /tmp/quick.json
    python benchmarks/step.py --render             the table again, from the stored result
    python benchmarks/step.py --check              exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness.report import Report, verdict, versions
from harness.samples import Results, say
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HERE = Path(__file__).resolve().parent
LIBRARIES = ("raw", "nbaccel", "accelerate")
MODELS = {  # widths of the layers, rows per batch, steps per block
    "tiny": ((32, 64, 10), 16, 150),
    "medium": ((256, 1024, 1024, 10), 64, 40),
}
LOOPS = ("train", "accumulate")
BLOCKS = 12
BARS = {"tiny": 0.92, "medium": 0.97}
IMPORT_BAR_MS = 60.0


# ------------------------------------------------------------------------- the loops


def parts(model_name: str, num_processes: int) -> tuple[Any, ...]:
    widths, rows, steps = MODELS[model_name]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    count = rows * steps * num_processes
    data = TensorDataset(torch.randn(count, widths[0]), torch.randint(widths[-1], (count,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return model, optimizer, scheduler, data, rows


def raw_block(model_name: str, num_processes: int, accumulation: int) -> Callable[[], Any]:
    model, optimizer, scheduler, data, rows = parts(model_name, num_processes)
    sampler = DistributedSampler(data, shuffle=False) if num_processes > 1 else None
    loader = DataLoader(data, batch_size=rows, sampler=sampler)
    if num_processes > 1:
        model = nn.parallel.DistributedDataParallel(model)

    def block() -> Any:
        for i, (x, y) in enumerate(loader, start=1):
            if accumulation > 1 and i % accumulation and i < len(loader):
                if num_processes > 1:
                    with model.no_sync():
                        (nn.functional.cross_entropy(model(x), y) / accumulation).backward()
                else:
                    (nn.functional.cross_entropy(model(x), y) / accumulation).backward()
                continue
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / accumulation if accumulation > 1 else loss).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return next(model.parameters()).detach().clone()

    return block


def prepared_block(
    library: str, model_name: str, num_processes: int, accumulation: int
) -> Callable[[], Any]:
    make = __import__(library).Accelerator
    accelerator = make(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler, data, rows = parts(model_name, num_processes)
    loader = DataLoader(data, batch_size=rows)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def plain() -> Any:
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return next(model.parameters()).detach().clone()

    def accumulating() -> Any:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return next(model.parameters()).detach().clone()

    return accumulating if accumulation > 1 else plain


def compare(model_name: str, loop: str, num_processes: int) -> dict[str, list[float]]:
    """Seconds of every block by library, taken in turns in this process; called on every rank."""
    torch.set_num_threads(1)
    accumulation = 4 if loop == "accumulate" else 1
    if num_processes > 1:
        torch.distributed.init_process_group("gloo")
    blocks: dict[str, Callable[[], Any]] = {
        "raw": raw_block(model_name, num_processes, accumulation)
    }
    for library in LIBRARIES[1:]:
        blocks[library] = prepared_block(library, model_name, num_processes, accumulation)
    check_same_work({name: block() for name, block in blocks.items()}, num_processes)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for round_number in range(BLOCKS):
        names = list(blocks)
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            if num_processes > 1:
                torch.distributed.barrier()
            begin = time.perf_counter()
            blocks[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def check_same_work(weights: dict[str, torch.Tensor], num_processes: int) -> None:
    """All three must have trained the same: at 2 ranks torch's sampler deals rows differently."""
    same = torch.equal if num_processes == 1 else lambda a, b: torch.allclose(a, b, atol=1e-2)
    for name, value in weights.items():
        if not same(value, weights["raw"]):
            raise AssertionError(f"{name} trained something else than raw torch")


# ------------------------------------------------------------------------- taking the figures


def one_launch(model_name: str, loop: str, num_processes: int) -> dict[str, list[float]]:
    """Run `compare` in a fresh interpreter; returns the times of rank 0."""
    arguments = (model_name, loop, num_processes)
    call = (
        f"step.compare{arguments}"
        if num_processes == 1
        else f"notebook_launcher(step.compare, {arguments}, num_processes={num_processes})[0]"
    )
    code = (
        f"import json, sys; sys.path[:0] = [{str(HERE)!r}]; import step; "
        f"from nbaccel import notebook_launcher; print('TIMES', json.dumps({call}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    if not lines:
        raise RuntimeError(f"the launch failed ({done.returncode}):\n{done.stderr[-2000:]}")
    found: dict[str, list[float]] = json.loads(lines[0].removeprefix("TIMES "))
    return found


def import_times(repeats: int) -> Iterator[tuple[float, bool]]:
    """Milliseconds of `import nbaccel` in a fresh interpreter, and whether torch came with it."""
    code = "import nbaccel, sys; print('torch' in sys.modules)"
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            capture_output=True,
            text=True,
            check=True,
        )
        line = next(x for x in done.stderr.splitlines() if re.search(r"\| +nbaccel$", x))
        yield int(line.split("|")[1]) / 1e3, done.stdout.strip() == "True"


def measure(results: Results, launches: int) -> None:
    results.forget("step")
    results.forget("import")
    for milliseconds, has_torch in import_times(launches * 3):
        results.of("import nbaccel", "nbaccel").values.append(milliseconds)
        results.of("import nbaccel", "nbaccel").facts.append({"torch": has_torch})
    for turn in range(launches):
        for model_name, loop, n in itertools.product(MODELS, LOOPS, (1, 2)):
            say(f"launch {turn + 1} of {launches}: {model_name}, {loop}, {n} ranks")
            steps = MODELS[model_name][2]
            for name, seconds in one_launch(model_name, loop, n).items():
                rates = [steps / s for s in seconds]
                results.of(row(model_name, loop, n), name).values += rates
    results.note("step", launches=launches, blocks=BLOCKS)
    results.save()


def row(model_name: str, loop: str, num_processes: int) -> str:
    return f"step {model_name}, {loop}, {num_processes} rank{'s' * (num_processes > 1)}"


def ratio(results: Results, measure_name: str, library: str) -> float:
    """Median over adjacent blocks: what disturbs one block mostly disturbs its neighbour, too."""
    mine = results.of(measure_name, library).values
    raw = results.of(measure_name, "raw").values
    return statistics.median(a / b for a, b in zip(mine, raw, strict=True))


# ------------------------------------------------------------------------- showing them


def render(results: Results) -> tuple[str, bool]:
    lines = [
        "| steps/s | raw torch | nbaccel | accelerate | bar |",
        "| --- | --: | --: | --: | --- |",
    ]
    holds = True
    for model_name, loop, n in itertools.product(MODELS, LOOPS, (1, 2)):
        name = row(model_name, loop, n)
        rates = {lib: results.median(name, lib) or 0.0 for lib in LIBRARIES}
        mine, theirs = ratio(results, name, "nbaccel"), ratio(results, name, "accelerate")
        good = mine >= BARS[model_name]
        holds &= good
        lines.append(
            f"| {name.removeprefix('step ')} | {rates['raw']:.0f} | {rates['nbaccel']:.0f} "
            f"({mine:.2f}x) | {rates['accelerate']:.0f} ({theirs:.2f}x) "
            f"| {verdict(good)} (at least {BARS[model_name]}) |"
        )
    found = results.of("import nbaccel", "nbaccel")
    milliseconds = found.median or 0.0
    clean = not any(fact["torch"] for fact in found.facts)
    good = clean and milliseconds < IMPORT_BAR_MS
    holds &= good
    facts = results.sections["step"]
    lines += [
        f"| `import nbaccel`, ms | | {milliseconds:.1f}, "
        f"{'without' if clean else '**with**'} torch | | {verdict(good)} "
        f"(below {IMPORT_BAR_MS:.0f}, without torch) |",
        "",
        f"Taken {facts['taken']}, {facts['launches']} launches of {facts['blocks']} blocks each; "
        f"load {facts['load']}; {facts['num_cores']} cores, {facts['memory_gib']} GiB; "
        + versions(facts)
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("step", render, mark="step")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--launches", type=int, default=5, metavar="N")
    options = parser.parse_args()
    return REPORT.run(options, lambda results: measure(results, options.launches))


if __name__ == "__main__":
    sys.exit(main())
