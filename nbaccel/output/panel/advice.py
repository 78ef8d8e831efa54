"""What a run's facts mean, and what to do: at most a sentence for each thing that is wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from nbaccel.base.units import count_noun, number_ranges
from nbaccel.output.panel.facts import ENDED_RUNS, RankFacts, RunBoard, throughput
from nbaccel.output.panel.rank_times import RankTimes

_LEAST_S = 2.0  # of training, before its shares mean something
_LEAST_DATA_SHARE = 0.3
_LEAST_GAIN = 1.2  # below it more ranks are hardly faster


def advice_of(board: RunBoard) -> list[str]:
    """Sentences, the most urgent first; none where nothing is wrong."""
    times = [one for one in board.times.by_rank().values() if one.steady_s >= _LEAST_S]
    return [
        *_no_numbers(board.ranks.values()),
        *_alone(board, times),
        *_data(times),
        *_not_worth(board),
    ]


def _no_numbers(ranks: Iterable[RankFacts]) -> Iterator[str]:
    """Of a loss that is no number any more: since when."""
    for facts in ranks:
        points = facts.loss.points()
        if not points or math.isfinite(points[-1][1]):
            continue
        finite = [place for place, (_, value) in enumerate(points) if math.isfinite(value)]
        step, value = points[finite[-1] + 1 if finite else 0]
        yield (
            f"{facts.loss_name} is {value} since step {step:,.0f}: what follows "
            "trains nothing. Stop, and try a smaller learning rate, clip_grad_norm_, or bf16 in "
            "place of fp16."
        )
        return  # the other ranks' are the same


def _alone(board: RunBoard, times: Sequence[RankTimes]) -> Iterator[str]:
    """Of several ranks that have trained, and none was ever in a process group."""
    ranks = board.ranks.values()
    has_trained = all(facts.told.steps and facts.histories for facts in ranks)
    if (
        len(times) == len(ranks) > 1
        and has_trained
        and not any(one.told.had_group for one in ranks)
    ):
        yield (
            f"Ranks {number_ranges(board.ranks)} have exchanged nothing: each trains a model of "
            "its own, perhaps on the same data. Accelerator.prepare or DistributedDataParallel "
            "makes them train one."
        )


def _data(times: Sequence[RankTimes]) -> Iterator[str]:
    """Of ranks that mostly wait for batches."""
    if not times:
        return
    share = statistics.fmean(one.data_s / one.steady_s for one in times)
    if share >= _LEAST_DATA_SHARE:
        yield (
            f"{100 * share:.0f} % of the time goes into waiting for data. Let the DataLoader read "
            "ahead in processes of its own (num_workers=2 or more, persistent_workers=True), or "
            "prepare the samples once before."
        )


def _not_worth(board: RunBoard) -> Iterator[str]:
    """Of ranks that do hardly more together than fewer did in an earlier run of the function."""
    rate = throughput(board)
    earlier_runs = [
        (len(run.ranks), rate_before)
        for run in ENDED_RUNS
        if board.title and run.title == board.title and len(run.ranks) < len(board.ranks)
        if (rate_before := throughput(run))
    ]
    if rate is None or not earlier_runs:
        return
    num_before, rate_before = earlier_runs[-1]
    if rate < _LEAST_GAIN * rate_before:
        ranks = count_noun(num_before, "rank")
        yield (
            f"{len(board.ranks)} ranks do {rate / rate_before:.2f} times the samples per second of "
            f"{ranks} (an earlier run of {board.title}), which is not worth it. Use "
            f"num_processes={num_before}, larger batches, or a device for each rank."
        )
