"""The runs of this process that have ended, the newest last."""

from __future__ import annotations

from collections import deque

from nbaccel.output.panel.facts import RunBoard

_RUNS: deque[RunBoard] = deque(maxlen=20)
_LEAST_STEPS = 10  # whose time means something


def note_run(board: RunBoard) -> None:
    """A launch, cell or call has ended, well or not."""
    _RUNS.append(board)


def all_runs() -> list[RunBoard]:
    """Those that are remembered."""
    return list(_RUNS)


def throughput(board: RunBoard) -> float | None:
    """Samples per second of all ranks over the whole run; None where too little is known."""
    ranks = board.ranks.values()
    if not all(facts.told.samples and (facts.told.steps or 0) >= _LEAST_STEPS for facts in ranks):
        return None
    return sum(facts.samples_pace.overall or 0.0 for facts in ranks) or None


def earlier_throughput(board: RunBoard) -> tuple[int, float] | None:
    """Of the last run of the same function with fewer ranks: how many, and samples per second."""
    for earlier in reversed(_RUNS):
        is_same = board.title and earlier.title == board.title and earlier is not board
        if is_same and len(earlier.ranks) < len(board.ranks) and (rate := throughput(earlier)):
            return len(earlier.ranks), rate
    return None
