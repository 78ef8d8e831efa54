"""How far the form's estimated time of a step is from a real one, way by way, on CPUs.

    python benchmarks/step_estimates.py             every way, about three minutes
    python benchmarks/step_estimates.py --render    the table again, from the stored result
    python benchmarks/step_estimates.py --check     exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402 - the line above must come first
from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402
from harness.table import as_grid  # noqa: E402
from torch import nn  # noqa: E402

from nbaccel import Accelerator, RunConfig, notebook_launcher  # noqa: E402
from nbaccel.notebook.picker.model import PickerModel  # noqa: E402

NUM_PROCESSES = 2
WARM_UP, STEPS = 2, 6
WITHIN = 3.0
"""A real step takes at most so many times the estimate, and at least that part of it."""
SAME = 1.25
"""Ways whose times differ by less may come in either order."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        looked = self.first(values)
        values = values + self.attention(looked, looked, looked, need_weights=False)[0]
        return values + self.down(torch.relu(self.up(self.second(values))))


class Language(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8000)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(input_ids)
        for block in self.blocks:
            values = block(values)
        return self.head(values)


MODELS = {
    "31 million, 512 tokens": (512, 7, 2, 256),
    "31 million, 64 tokens": (512, 7, 1, 64),
}


def step_seconds(sizes: tuple[int, int, int, int], mixed_precision: str) -> list[float]:
    """In a worker: seconds of each step, process 0's."""
    width, layers, samples, tokens = sizes
    accelerator = Accelerator(mixed_precision=mixed_precision)
    model = Language(width, layers)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    batch = torch.randint(0, 8000, (samples, tokens))
    seconds = []
    for _ in range(WARM_UP + STEPS):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        loss = model(batch).float().logsumexp(-1).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    accelerator.end_training()
    return seconds[WARM_UP:]


def measure(results: Results) -> None:
    results.forget("s")
    for label, sizes in MODELS.items():
        width, layers, samples, tokens = sizes
        model = Language(width, layers)
        batch = {"input_ids": torch.zeros(samples, tokens, dtype=torch.long)}
        picker = PickerModel(
            RunConfig(num_processes=NUM_PROCESSES), model=model, sample_batch=batch
        )
        for way in picker.candidates():
            if not way.can_be_taken or way.step_s is None:
                say(f"{label}: {way.name} is left out: {way.refusal or way.verdict}")
                continue
            say(f"{label}: {way.name}")
            taken: Any = notebook_launcher(
                step_seconds,
                (sizes, way.config.mixed_precision),
                config=way.config.changed(start_method="template"),
            )
            results.of(f"s {label}", way.name).values.extend(taken[0])
            results.of(f"s {label} estimate", way.name).values.append(way.step_s)
    results.note("s", repeats=STEPS)
    results.save()


def rows_of(results: Results, label: str) -> list[tuple[str, float, float]]:
    """Way, seconds, estimated seconds."""
    return [
        (
            name,
            statistics.median(samples.values),
            results.median(f"s {label} estimate", name) or 0.0,
        )
        for (what, name), samples in results.samples.items()
        if what == f"s {label}" and samples.values
    ]


def out_of_order(rows: list[tuple[str, float, float]]) -> list[str]:
    """Pairs of ways that the estimates put the other way round than the clock."""
    return [
        f"{slow[0]} before {fast[0]}"
        for fast in rows
        for slow in rows
        if slow[1] > SAME * fast[1] and slow[2] * SAME < fast[2]
    ]


def render(results: Results) -> tuple[str, bool]:
    grid, holds, wrong = [], bool(results.sections), []
    for label in MODELS:
        rows = rows_of(results, label)
        wrong += out_of_order(rows)
        for name, seconds, estimate in rows:
            share = seconds / estimate
            is_held = 1 / WITHIN <= share <= WITHIN
            holds &= is_held
            grid.append(
                [label, name, f"{seconds:.3f}", f"{estimate:.3f}", f"{share:.2f}", verdict(is_held)]
            )
    holds &= not wrong
    header = ["model", "way", "a step, s", "estimated, s", "ratio", "bar"]
    note = results.sections.get("s", {})
    told = (
        f"Bars: a step takes {1 / WITHIN:.2f} to {WITHIN:.0f} times the estimate, and of two ways "
        f"that differ by more than {SAME} the faster one has the lower estimate "
        f"({'pass' if not wrong else '**FAIL**: ' + ', '.join(wrong)}). {NUM_PROCESSES} processes, "
        f"fp32, medians of {note.get('repeats')} steps of rank 0; load {note.get('load')}. "
    )
    taken = f"Taken {note.get('taken')}; {versions(note, ('python', 'torch'))}." if note else ""
    return f"{as_grid(header, grid)}\n\n{told}{taken}\n", holds


REPORT = Report("step_estimates", render, "step_estimates")


if __name__ == "__main__":
    sys.exit(REPORT.run(REPORT.parser(__doc__).parse_args(), measure))
