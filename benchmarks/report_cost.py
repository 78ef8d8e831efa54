"""What it costs a training loop that it is seen, and each rank's time accounted for.

    python benchmarks/report_cost.py                     240 pairs of blocks, about eight minutes
    python benchmarks/report_cost.py --pairs 6 --no-page --output /tmp/quick.json
    python benchmarks/report_cost.py --render            the table again, from the stored result
    python benchmarks/report_cost.py --check             exit status 1 when a bar does not hold

Two workers train with DDP. Blocks with the hooks and blocks without them alternate in the same
processes, in a changing order; a ratio is that of the two blocks of a pair.
Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.report import Report, verdict, versions
from harness.samples import Results, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, notebook_launcher
from nbaccel.base import spent_time
from nbaccel.loops import loop_watch

MODELS = {  # widths of the layers, rows per batch, steps per block
    # Short blocks: what else the machine does changes from second to second.
    "tiny": ((32, 64, 10), 16, 200),
    "medium": ((256, 1024, 1024, 10), 64, 25),
}
WITH, WITHOUT = "with the hooks", "without"
BAR = 1.01
NUM_PROCESSES = 2


class Hooks:
    """Puts the hooks of this worker in their places, and takes them away."""

    def __init__(self, model: nn.Module) -> None:
        self._account = spent_time.present_account()
        self._counted_wait: Any = dist.Work.wait
        self._model: Any = model
        self._watch: Any = vars(loop_watch)["_watch"]
        self._is_on = True

    def set(self, is_on: bool) -> None:
        if is_on != self._is_on:
            self._is_on = is_on
            (self._watch.set_hooks if is_on else self._watch.remove_hooks)()
            vars(loop_watch)["_watch"] = self._watch if is_on else None
        spent_time.use_account(self._account if is_on else None)
        plain_wait = self._counted_wait.__wrapped__
        dist.Work.wait = self._counted_wait if is_on else plain_wait  # type: ignore[method-assign]
        # As torch has it, unless nbaccel asks for more.
        self._model._set_ddp_runtime_logging_sample_rate(1 if is_on else 100)  # noqa: SLF001


def compare(model_name: str, num_pairs: int) -> dict[str, list[float]]:
    """Seconds of every block; called on every rank."""
    torch.set_num_threads(1)
    widths, rows, steps = MODELS[model_name]
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model: Any = nn.Sequential(*layers[:-1])
    count = rows * steps * NUM_PROCESSES
    data = TensorDataset(torch.randn(count, widths[0]), torch.randint(widths[-1], (count,)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=rows)
    )

    def block() -> None:
        # As people have it: nothing is reported, all is seen.
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    hooks = Hooks(model)
    block()
    times: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for number in range(num_pairs):
        for name in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
            hooks.set(name == WITH)
            dist.barrier()
            began = time.perf_counter()
            block()
            times[name].append(time.perf_counter() - began)
    hooks.set(True)
    return times


def measure(results: Results, num_pairs: int) -> None:
    results.forget("c")
    for model_name, (_, _, steps) in MODELS.items():
        say(f"{model_name}: {num_pairs} pairs")
        times = notebook_launcher(compare, (model_name, num_pairs), num_processes=NUM_PROCESSES)[0]
        for name in (WITH, WITHOUT):
            for seconds in times[name]:
                results.of(f"c {model_name}", name).values.append(seconds / steps)
    results.note("c", pairs=num_pairs)
    results.save()


def render(results: Results) -> tuple[str, bool]:
    lines = [
        "| a step of a small loop, 2 workers | steps/s with the hooks | without | ratio of the "
        "times | bar |",
        "| --- | --: | --: | --: | --: |",
    ]
    holds = True
    for model_name in MODELS:
        with_hooks = results.get(f"c {model_name}", WITH)
        without = results.get(f"c {model_name}", WITHOUT)
        if with_hooks is None or without is None:
            return "Nothing has been measured yet.", False
        ratio = statistics.median(
            a / b for a, b in zip(with_hooks.values, without.values, strict=True)
        )
        holds = holds and ratio <= BAR
        rates = [f"{1 / (samples.median or 1.0):,.0f}" for samples in (with_hooks, without)]
        cells = [model_name, *rates, f"{ratio:.4f}", verdict(ratio <= BAR)]
        lines.append(f"| {' | '.join(cells)} |")
    facts = results.sections["c"]
    told = (
        f"Bar: at most {BAR}. Medians of {facts['pairs']} pairs of blocks that alternate; "
        f"{versions(facts, ('torch',))}."
    )
    return "\n".join([*lines, "", told]), holds


REPORT = Report(name="report_cost", render=render, mark="report_cost")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=240, help="blocks of each kind")
    options = parser.parse_args()
    # Not shown: the panel's own time would be the same for both, but would hide theirs.
    os.environ["NBACCEL_DASHBOARD"] = "0"
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    return REPORT.run(options, lambda results: measure(results, options.pairs))


if __name__ == "__main__":
    sys.exit(main())
