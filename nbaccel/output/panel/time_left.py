"""What is left of a training: of all its epochs where their number is known, else of the loop.

Where it is known from: a loop over epochs with a bar of `accelerator.progress`, or its `epochs=`,
or a bar of tqdm around the loop over batches; ranks report all of these. What epochs took that are
over counts for those to come, with all that lies between their loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbaccel.base.training_metrics import OuterLoop

if TYPE_CHECKING:
    from nbaccel.output.panel.facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """An estimate."""

    seconds: float
    of_what: str
    """`epoch` or `loop`; empty for the whole training."""


def epochs_around(facts: RankFacts, now: float) -> OuterLoop | None:
    """The loop around the innermost one that a rank is in, mostly over epochs."""
    outer = facts.told.outer
    if outer is None:
        return None
    return replace(outer, round_s=outer.round_s + max(0.0, now - facts.told.time))


def is_over_epochs(facts: RankFacts) -> bool:
    """Whether the rounds of the loop around the innermost one are epochs, as far as is known."""
    # Else it is a bar of tqdm around another bar, and may count anything.
    bars = facts.told.bars
    return bool(facts.told.epoch) or any("epoch" in bar.description.lower() for bar in bars[:1])


def steps_in_all(facts: RankFacts, now: float) -> int | None:
    """How many steps a rank will have taken in the end; None where that is not known."""
    around = epochs_around(facts, now)
    loop = facts.told
    if around is None or not loop.total_batches or facts.told.steps is None:
        return None
    # A step may take several batches.
    steps_per_batch = 1.0
    if loop.loop_is_seen and loop.batches:
        steps_per_batch = (facts.told.steps - loop.loop_began_at_step) / loop.batches
    left = round(steps_per_batch * max(0, loop.total_batches - loop.batches))
    if around.done:
        per_epoch = round(around.done_steps / around.done)
        left = max(left, per_epoch - around.round_steps)
    else:
        per_epoch = around.round_steps + left
    return facts.told.steps + left + per_epoch * max(0, around.total - around.done - 1)


def most_left(ranks: Iterable[RankFacts], now: float) -> TimeLeft | None:
    """What the slowest rank has left; None where nothing is known."""
    estimates = [estimate for facts in ranks if (estimate := _rank_left(facts, now)) is not None]
    return max(estimates, key=lambda left: (not left.of_what, left.seconds), default=None)


def _rank_left(facts: RankFacts, now: float) -> TimeLeft | None:
    around = epochs_around(facts, now)
    loop_s = _loop_left_s(facts, now)
    if around is not None and around.total > around.done:
        whole_s = _whole_left_s(facts, around, loop_s, now)
        return None if whole_s is None else TimeLeft(seconds=whole_s, of_what="")
    outer_s = _outer_bar_left_s(facts, now)
    if outer_s is not None:
        return TimeLeft(seconds=outer_s, of_what="")
    if loop_s is None:
        return None
    is_epoch = bool(facts.told.epoch) and not facts.told.loop_name
    return TimeLeft(seconds=loop_s, of_what="epoch" if is_epoch else "loop")


def _outer_bar_left_s(facts: RankFacts, now: float) -> float | None:
    """What a bar says by itself of the whole training; None where that is not its bar."""
    bars = facts.told.bars
    is_whole = facts.told.bar_is_whole or (len(bars) > 1 and not facts.told.epoch)
    if not bars or not is_whole or bars[0].fraction == 1.0 or bars[0].left_s is None:
        return None
    return max(0.0, bars[0].left_s - max(0.0, now - facts.told.time))


def _whole_left_s(
    facts: RankFacts, around: OuterLoop, loop_s: float | None, now: float
) -> float | None:
    epochs = around.total - around.done - 1
    if around.done and around.done_s > 0:
        per_epoch_s = around.done_s / around.done
        # An epoch that takes longer than those before it is not over for that.
        return max(per_epoch_s - around.round_s, loop_s or 0.0) + per_epoch_s * epochs
    if loop_s is None:
        return None
    return loop_s + _first_epoch_s(facts, around, loop_s, now) * epochs


def _first_epoch_s(facts: RankFacts, around: OuterLoop, loop_s: float, now: float) -> float:
    """What the first epoch will have taken."""
    pace = facts.batch_pace.recent(now)
    if facts.told.total_batches and pace and around.round_steps <= facts.told.batches:
        # Its first loop: at the pace of now, which a slow start does not count in.
        return facts.told.total_batches / pace
    inner_bar = next((bar for bar in reversed(facts.told.bars) if bar.left_s == loop_s), None)
    if not facts.told.total_batches and inner_bar is not None:
        return inner_bar.elapsed_s + loop_s
    return around.round_s + loop_s


def _loop_left_s(facts: RankFacts, now: float) -> float | None:
    """What is left of the innermost loop."""
    if facts.told.total_batches is not None:
        batch_rate = facts.batch_pace.recent(now)
        left_batches = facts.told.total_batches - facts.told.batches
        return left_batches / batch_rate if batch_rate and left_batches > 0 else None
    open_bars = [bar for bar in facts.told.bars if bar.fraction != 1.0]
    return next((bar.left_s for bar in reversed(open_bars) if bar.left_s is not None), None)
