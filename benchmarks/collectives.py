"""Collectives of `Accelerator`, whose first calls are compared, beside those of torch.distributed.

    python benchmarks/collectives.py                  3 launches per number of ranks, minutes
    python benchmarks/collectives.py --launches 1 --no-page --output /tmp/quick.json
    python benchmarks/collectives.py --render         the table again, from the stored result
    python benchmarks/collectives.py --check          exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.report import Report, verdict, versions
from harness.samples import Results, say

NUM_RANKS = (2, 4, 8)
SIZES = (64, 65536)  # floats
NUM_CALLS = 200  # of a block: the mean that the bar is about
# At least and at most: a block varies by a third, so hundreds of them tell 1.05 from 1.
BLOCKS = (4, 120)
ROW_S = 8.0  # for a row of a launch, if that is not too little for the least number of blocks
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

    def barrier() -> None:
        accelerator.wait_for_everyone()

    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: accelerator.gather(tensor),
        "reduce": lambda: accelerator.reduce(tensor, "sum"),
        "broadcast": lambda: broadcast(tensor),
        "gather_object": lambda: gather_object(tensor.tolist()),
        "barrier": barrier,
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
        times[name] = {subject: [] for subject in calls}
        for block in range(count_blocks(calls["raw"], accelerator)):
            # In turns, and in another order every time: what is first finds another machine.
            for subject in sorted(calls, reverse=block % 2 == 1):
                call = calls[subject]
                if subject == "nbaccel":
                    call = at_new_place(call, f"{name}, {block}")
                times[name][subject].append(time_block(call))
    return times


def at_new_place(call: Callable[[], Any], place: str) -> Callable[[], Any]:
    """The same function as if it stood in another file, where nbaccel compares the first calls."""
    code = call.__code__.replace(co_filename=f"{place}.py")  # type: ignore[attr-defined]
    return types.FunctionType(code, globals(), closure=call.__closure__)  # type: ignore[attr-defined]


def check_same_result(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    expected, found = calls["raw"](), calls["nbaccel"]()
    is_same = torch.equal(expected, found) if torch.is_tensor(found) else expected == found
    if not is_same:
        raise AssertionError(f"{name}: another result than that of torch.distributed")


def count_blocks(call: Callable[[], Any], accelerator: Any) -> int:
    """Blocks of a row, the same on all ranks."""
    begin = time.perf_counter()
    for _ in range(20):
        call()
    taken = torch.tensor([time.perf_counter() - begin])
    block_s = accelerator.reduce(taken, "max").item() / 20 * NUM_CALLS
    least, most = BLOCKS
    return max(least, min(most, int(ROW_S / (2 * block_s))))


def time_block(call: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    # Who sends a broadcast does not wait for those who receive it.
    dist.barrier()
    return (time.perf_counter() - begin) / NUM_CALLS * 1e6


# ------------------------------------------------------------------------- taking the figures


def measure(results: Results, launches: int) -> None:
    from nbaccel import notebook_launcher

    results.forget("collectives")
    for turn, n in itertools.product(range(launches), NUM_RANKS):
        say(f"launch {turn + 1} of {launches}: {n} ranks")
        times = notebook_launcher(compare, num_processes=n)[0]
        for name, subject in itertools.product(times, ("raw", "nbaccel")):
            results.of(row(name, n), subject).values += times[name][subject]
    results.note("collectives", launches=launches, num_calls=NUM_CALLS)
    results.save()


def row(name: str, num_ranks: int) -> str:
    return f"collectives {name}, {num_ranks} ranks"


def ratio(results: Results, measure_name: str) -> tuple[float, float, float]:
    """Median over adjacent blocks, and the limits of its 95 % confidence interval.

    What disturbs one block mostly disturbs its neighbour, too. The limits are order statistics
    (Conover, Practical Nonparametric Statistics, section 3.2).
    """
    mine = results.of(measure_name, "nbaccel").values
    raw = results.of(measure_name, "raw").values
    ratios = sorted(a / b for a, b in zip(mine, raw, strict=True))
    margin = 1.96 * len(ratios) ** 0.5 / 2
    lowest, highest = int(len(ratios) / 2 - margin), int(len(ratios) / 2 + margin)
    return (
        statistics.median(ratios),
        ratios[max(0, lowest)],
        ratios[min(len(ratios) - 1, highest)],
    )


# ------------------------------------------------------------------------- showing them


def render(results: Results) -> tuple[str, bool]:
    lines = ["| µs per call | torch | nbaccel | 95 % | bar |", "| --- | --: | --: | --: | --- |"]
    holds = True
    for name, n in itertools.product(CALLS, NUM_RANKS):
        measure_name = row(name, n)
        found, low, high = ratio(results, measure_name)
        # What cannot be told from the bar in so many blocks neither holds nor breaks it.
        told = "open" if low <= BAR < found else verdict(found <= BAR)
        holds &= told != verdict(False)
        raw, mine = (results.median(measure_name, s) or 0.0 for s in ("raw", "nbaccel"))
        lines.append(
            f"| {name}, {n} ranks | {raw:.0f} | {mine:.0f} "
            f"({found:.2f}x) | {low:.2f} to {high:.2f} | {told} (at most {BAR}) |"
        )
    facts = results.sections["collectives"]
    lines += [
        "",
        f"Taken {facts['taken']}, {facts['launches']} launches, blocks of {facts['num_calls']} "
        f"calls; load {facts['load']}; {facts['num_cores']} cores, {facts['memory_gib']} GiB; "
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
