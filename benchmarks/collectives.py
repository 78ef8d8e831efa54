"""Collectives of `Accelerator`, which compare the calls first, beside those of torch.distributed.

    python benchmarks/collectives.py                  3 launches per number of ranks, minutes
    python benchmarks/collectives.py --launches 1 --no-page --output /tmp/quick.json
    python benchmarks/collectives.py --render         the table again, from the stored result
    python benchmarks/collectives.py --check          exit status 1 when a bar does not hold

Read docs/pages/benchmarks.md for what each row means.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.report import Report, verdict, versions
from harness.samples import Results, say

NUM_RANKS = (2, 4, 8)
# Floats: the first two go along with one comparison, the last with several.
SIZES = (64, 65536, 1048576)
BLOCKS = 24
BLOCK_S = 0.1  # of raw calls
BAR = 1.05
CALLS = {
    "barrier": 0,
    f"gather_object of {SIZES[0]} floats": SIZES[0],
    **{f"{call} of {n} floats": n for n in SIZES for call in ("gather", "reduce", "broadcast")},
}


# ------------------------------------------------------------------------- one rank


def raw_call(name: str, tensor: torch.Tensor, world_size: int) -> Callable[[], Any]:
    """What a script without nbaccel would call, with a new result as nbaccel gives one."""
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather() -> torch.Tensor:
        joined = tensor.new_empty(world_size * tensor.numel())
        gather_into(joined, tensor)
        return joined

    def reduce() -> torch.Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    def broadcast() -> torch.Tensor:
        dist.broadcast(tensor, 0)
        return tensor

    def gather_object() -> list[Any]:
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, tensor.tolist())
        return list(itertools.chain.from_iterable(objects))

    calls = {
        "gather": gather,
        "reduce": reduce,
        "broadcast": broadcast,
        "gather_object": gather_object,
        "barrier": dist.barrier,
    }
    return calls[name.split(maxsplit=1)[0]]


def own_call(name: str, tensor: torch.Tensor, accelerator: Any) -> Callable[[], Any]:
    from nbaccel.utils import broadcast, gather_object

    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: accelerator.gather(tensor),
        "reduce": lambda: accelerator.reduce(tensor, "sum"),
        "broadcast": lambda: broadcast(tensor),
        "gather_object": lambda: gather_object(tensor.tolist()),
        "barrier": accelerator.wait_for_everyone,
    }
    return calls[name.split(maxsplit=1)[0]]


def compare() -> dict[str, dict[str, list[float]]]:
    """Microseconds per call of every block, in turns; called on every rank."""
    from nbaccel import Accelerator

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    times: dict[str, dict[str, list[float]]] = {}
    for name, num_floats in CALLS.items():
        tensor = torch.full((num_floats or 1,), float(accelerator.process_index))
        calls = {
            "raw": raw_call(name, tensor, accelerator.num_processes),
            "nbaccel": own_call(name, tensor, accelerator),
        }
        check_same_result(name, calls)
        repeats = count_repeats(calls["raw"], accelerator)
        times[name] = {subject: [] for subject in calls}
        for block in range(BLOCKS):
            # In turns, and in another order every time: what is first finds another machine.
            for subject in sorted(calls, reverse=block % 2 == 1):
                times[name][subject].append(time_block(calls[subject], repeats))
    return times


def check_same_result(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    expected, found = calls["raw"](), calls["nbaccel"]()
    is_same = torch.equal(expected, found) if torch.is_tensor(found) else expected == found
    if not is_same:
        raise AssertionError(f"{name}: another result than that of torch.distributed")


def count_repeats(call: Callable[[], Any], accelerator: Any) -> int:
    """Calls per block, the same on all ranks."""
    begin = time.perf_counter()
    for _ in range(10):
        call()
    taken = torch.tensor([time.perf_counter() - begin])
    return max(5, int(BLOCK_S / (accelerator.reduce(taken, "max").item() / 10)))


def time_block(call: Callable[[], Any], repeats: int) -> float:
    dist.barrier()
    for _ in range(3):
        call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


# ------------------------------------------------------------------------- taking the figures


def measure(results: Results, launches: int) -> None:
    from nbaccel import notebook_launcher

    results.forget("collectives")
    for turn, n in itertools.product(range(launches), NUM_RANKS):
        say(f"launch {turn + 1} of {launches}: {n} ranks")
        times = notebook_launcher(compare, num_processes=n)[0]
        for name, subject in itertools.product(times, ("raw", "nbaccel")):
            results.of(row(name, n), subject).values += times[name][subject]
    results.note("collectives", launches=launches, blocks=BLOCKS)
    results.save()


def row(name: str, num_ranks: int) -> str:
    return f"collectives {name}, {num_ranks} ranks"


def ratio(results: Results, measure_name: str) -> float:
    """Median over adjacent blocks: what disturbs one block mostly disturbs its neighbour, too."""
    mine = results.of(measure_name, "nbaccel").values
    raw = results.of(measure_name, "raw").values
    return statistics.median(a / b for a, b in zip(mine, raw, strict=True))


# ------------------------------------------------------------------------- showing them


def render(results: Results) -> tuple[str, bool]:
    lines = ["| µs per call | torch | nbaccel | bar |", "| --- | --: | --: | --- |"]
    holds = True
    for name, n in itertools.product(CALLS, NUM_RANKS):
        measure_name = row(name, n)
        found = ratio(results, measure_name)
        holds &= found <= BAR
        raw, mine = (results.median(measure_name, s) or 0.0 for s in ("raw", "nbaccel"))
        lines.append(
            f"| {name}, {n} ranks | {raw:.0f} | {mine:.0f} "
            f"({found:.2f}x) | {verdict(found <= BAR)} (at most {BAR}) |"
        )
    facts = results.sections["collectives"]
    lines += [
        "",
        f"Taken {facts['taken']}, {facts['launches']} launches of {facts['blocks']} blocks each; "
        f"load {facts['load']}; {facts['num_cores']} cores, {facts['memory_gib']} GiB; "
        + versions(facts, ("python", "nbaccel", "torch"))
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("collectives", render, mark="collectives")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--launches", type=int, default=3, metavar="N")
    options = parser.parse_args()
    return REPORT.run(options, lambda results: measure(results, options.launches))


if __name__ == "__main__":
    sys.exit(main())
