"""Launch, step, and calls of live workers in this checkout, beside another revision of it.

    python benchmarks/revisions.py REVISION            6 pairs of runs, about five minutes
    python benchmarks/revisions.py REVISION --pairs 2

A pair is one run of each revision in fresh processes, now this one first, now the other; what is
printed is the median of the ratios of the pairs (this checkout / REVISION), and the least and the
largest. Under 1 means that this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from harness.revision import REPOSITORY, checkout_of

LAUNCHES, CALLS = 4, 300
REST_S = 12.0
"""After the first launch: the template is made while a user reads and writes on."""
BLOCKS, STEPS = 15, 100
"""Steps are timed in blocks, of which the median counts: what else the machine does hits a few."""


def _one() -> int:
    return 1


def _one_of(model: object) -> int:
    return 1


def measure() -> dict[str, float]:
    """Seconds of one run, by what was timed."""
    import torch
    from torch import nn

    from nbaccel import Accelerator, Pool, RunConfig, notebook_launcher

    torch.manual_seed(0)
    seconds = {}
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    notebook_launcher(_one_of, (model,), num_processes=2, use_port="0")
    time.sleep(REST_S)
    start_time = time.perf_counter()
    for _ in range(LAUNCHES):
        notebook_launcher(_one_of, (model,), num_processes=2, use_port="0")
    seconds["launch, 2 processes"] = (time.perf_counter() - start_time) / LAUNCHES

    start_time = time.perf_counter()
    pool = Pool(config=RunConfig(num_processes=2, device="cpu"), namespace={})
    pool.start()
    seconds["pool, start of 2 workers"] = time.perf_counter() - start_time
    try:
        pool.call(_one)
        start_time = time.perf_counter()
        for _ in range(CALLS):
            pool.call(_one)
        seconds["pool, one call"] = (time.perf_counter() - start_time) / CALLS
    finally:
        pool.stop()

    accelerator = Accelerator(cpu=True)
    small = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    small, optimizer = accelerator.prepare(small, torch.optim.SGD(small.parameters(), lr=1e-3))
    batch, labels = torch.randn(16, 32), torch.randint(10, (16,))
    block_times = []
    for _ in range(BLOCKS):
        start_time = time.perf_counter()
        for _ in range(STEPS):
            with accelerator.accumulate(small):
                loss = nn.functional.cross_entropy(small(batch), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(small.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        block_times.append((time.perf_counter() - start_time) / STEPS)
    seconds["step of a tiny model, 1 process"] = statistics.median(block_times)
    return seconds


def _run(checkout: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    finished = subprocess.run(
        [sys.executable, __file__, "--measure"],
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return dict(json.loads(finished.stdout.splitlines()[-1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    ratios: dict[str, list[float]] = defaultdict(list)
    with checkout_of(options.revision) as other:
        for pair in range(options.pairs):
            if pair % 2:
                theirs, ours = _run(other), _run(REPOSITORY)
            else:
                ours, theirs = _run(REPOSITORY), _run(other)
            for what, seconds in ours.items():
                ratios[what].append(seconds / theirs[what])
    print(f"| | this checkout / {options.revision} | least, largest |")
    print("|---|--:|--:|")
    for what, values in ratios.items():
        print(
            f"| {what} | {statistics.median(values):.2f} | {min(values):.2f}, {max(values):.2f} |"
        )


if __name__ == "__main__":
    main()
