"""From what was seen of a run to the facts of its report."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import device_row
from nbaccel.output.dashboard.board import RankFacts, RunBoard
from nbaccel.output.dashboard.drawing import left_out_sentence
from nbaccel.output.dashboard.rank_times import RankTimes
from nbaccel.output.report.report_facts import (
    MetricCurve,
    PlannedRun,
    RankFigures,
    RunFacts,
    SeenWarning,
)
from nbaccel.output.report.run_report import RunReport
from nbaccel.output.seen_warnings import SeenWarnings
from nbaccel.plan import Plan

__all__ = ["ObservedRun", "latest_run", "report_of"]

_LATEST_RUNS: list[ObservedRun] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """What was seen of a run while it was watched."""

    board: RunBoard
    warnings: SeenWarnings
    plan: Plan
    ended_at: dt.datetime
    """In UTC."""

    @classmethod
    def ended_now(cls, board: RunBoard, warnings: SeenWarnings, plan: Plan) -> ObservedRun:
        """A run that has just ended."""
        ended_at = dt.datetime.now(dt.timezone.utc)
        observed = cls(board=board, warnings=warnings, plan=plan, ended_at=ended_at)
        _LATEST_RUNS[:] = [observed]
        return observed


def latest_run() -> ObservedRun | None:
    """The launch, cell or call that ended last, well or not; None before the first one."""
    return next(iter(_LATEST_RUNS), None)


def report_of(observed: ObservedRun | None, source: str) -> RunReport:
    """The report of a run."""
    if observed is None:
        raise ConfigError(
            f"{source} has nothing to report: no run was watched for it. Call report() of what "
            "notebook_launcher returned, or of a pool in which a cell or a call has run."
        )
    return RunReport(_collect_facts(observed))


def _collect_facts(observed: ObservedRun) -> RunFacts:
    plan = observed.plan
    board = observed.board
    times_by_rank = {times.rank: times for times in board.times.by_rank()}
    began = observed.ended_at - dt.timedelta(seconds=board.seconds)
    return RunFacts(
        nbaccel_version=sys.modules["nbaccel"].__version__,
        began=began.isoformat(timespec="seconds"),
        seconds=board.seconds,
        ending=board.ending,
        plan=PlannedRun(
            text=plan.explain(),
            headline=plan.headline(),
            device=plan.device,
            num_processes=plan.num_processes,
            world_size=plan.world_size,
            warnings=plan.warnings,
        ),
        ranks=tuple(
            _figures_of(rank_facts, times_by_rank.get(rank_facts.rank))
            for rank_facts in board.ranks.values()
        ),
        slowest=board.times.slowest(),
        curves=tuple(_curves_of(board)),
        marks=_marks_of(board),
        warnings=tuple(
            SeenWarning(text=text, count=seen.count, ranks=tuple(sorted(seen.ranks)))
            for text, seen in observed.warnings.by_text.items()
        ),
        notes=tuple(_notes_of(observed, times_by_rank.values())),
    )


def _figures_of(rank_facts: RankFacts, times: RankTimes | None) -> RankFigures:
    samples = rank_facts.samples or None
    return RankFigures(
        rank=rank_facts.rank,
        steps=rank_facts.steps,
        steps_per_s=rank_facts.pace.overall,
        samples=samples,
        samples_per_s=rank_facts.samples_pace.overall if samples else None,
        peak_host_bytes=rank_facts.peak_rss_bytes or None,
        peak_device_bytes=rank_facts.peak_device_bytes,
        times=times,
    )


def _curves_of(board: RunBoard) -> Iterable[MetricCurve]:
    for name in board.metric_names():
        for rank_facts in board.ranks.values():
            history = rank_facts.histories.get(name)
            points = history.points() if history is not None else []
            if points:
                yield MetricCurve(
                    name=name,
                    rank=rank_facts.rank,
                    steps=tuple(step for step, _ in points),
                    values=tuple(value for _, value in points),
                )


def _marks_of(board: RunBoard) -> tuple[tuple[float, str], ...]:
    """The starts of loops of the first rank that has some: the others are in step with it."""
    marks = (rank_facts.epoch_marks for rank_facts in board.ranks.values())
    return tuple(next(filter(None, marks), ()))


def _notes_of(observed: ObservedRun, all_times: Iterable[RankTimes]) -> Iterable[str]:
    """What was measured how, and what was not."""
    rank_times = list(all_times)
    if rank_times:
        yield (
            "Times begin with a rank's first loop over batches. Waiting for data is known of "
            "prepared loaders and of accelerator.progress; computing is what is left."
        )
    else:
        yield (
            "No times: no rank has gone through a prepared loader or accelerator.progress, or "
            "called accelerator.log."
        )
    if len(rank_times) > 1:
        yield (
            "Waiting for others is what a rank spent in collectives beyond the rank that spent "
            "least there, compared over two seconds each."
        )
    device_name = observed.plan.device
    if rank_times and not device_row(device_name).in_host_memory:
        yield (
            f"On {device_name}, collectives run beside the program. Counted are those of nbaccel "
            "and what torch measures of DDP's exchange of gradients; others are in computing."
        )
    if any(times.is_partial for times in rank_times):
        yield (
            "This torch does not tell how long DDP's exchange of gradients takes: it is in "
            "computing, and so is waiting for others there."
        )
    has_memory = any(rank_facts.peak_rss_bytes for rank_facts in observed.board.ranks.values())
    yield (
        "Memory was looked at once a second; what was taken for less may not show."
        if has_memory
        else "Memory is looked at once a second, and the run had ended before."
    )
    if sentence := left_out_sentence(observed.board):
        yield f"{sentence}."
    if observed.warnings.num_left_out:
        yield f"{observed.warnings.num_left_out:,} more warnings with other texts were not kept."
