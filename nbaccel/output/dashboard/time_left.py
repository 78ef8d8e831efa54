"""What is left of a training: of all its epochs where their number is known, else of the loop.

Where it is known from: a loop over epochs with a bar of `accelerator.progress`, or its `epochs=`,
which ranks report; or a bar of tqdm around the loop over batches, read from what it draws. What
epochs took that are over counts for those to come, with all that lies between their loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbaccel.base.outer_loop import OuterLoop
from nbaccel.output.tqdm_text import outer_bar_of

if TYPE_CHECKING:
    from nbaccel.output.dashboard.board import RankFacts
    from nbaccel.output.tqdm_text import BarText

__all__ = [
    "TimeLeft",
    "epochs_around",
    "is_over_epochs",
    "most_left",
    "steps_in_all",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """An estimate."""

    seconds: float
    of_what: str
    """`epoch` or `loop`; empty for the whole training."""


def epochs_around(rank_facts: RankFacts, current_time: float) -> OuterLoop | None:
    """The loop around the innermost one that a rank is in, mostly over epochs."""
    if rank_facts.outer is not None:
        since_s = max(0.0, current_time - rank_facts.received_at)
        return replace(rank_facts.outer, round_s=rank_facts.outer.round_s + since_s)
    seen_bar = rank_facts.seen_bar
    outer_bar = outer_bar_of(rank_facts.bars)
    if outer_bar is None or seen_bar is None or not outer_bar.total.isdecimal():
        return None
    if not outer_bar.done.isdecimal() or not _is_around(outer_bar, rank_facts):
        return None
    done = int(outer_bar.done)
    total_batches = rank_facts.total_batches or 0
    return OuterLoop(
        total=int(outer_bar.total),
        done=done,
        done_s=outer_bar.elapsed_s or 0.0,
        round_s=max(0.0, current_time - seen_bar.seen_at),
        done_steps=done * total_batches,
        round_steps=max(0, (rank_facts.steps or 0) - done * total_batches),
    )


def _is_around(outer_bar: BarText, rank_facts: RankFacts) -> bool:
    """Whether a bar is that of a loop around another one, and not one that was left half done."""
    if rank_facts.epoch:
        # An epoch's loop may be over before the bar around it is drawn again.
        return rank_facts.epoch - 1 <= int(outer_bar.done) <= rank_facts.epoch
    return len(rank_facts.bars) > 1


def is_over_epochs(rank_facts: RankFacts) -> bool:
    """Whether the rounds of the loop around the innermost one are epochs, as far as is known."""
    # Else it is a bar of tqdm around another bar, and may count anything.
    outer_bar = outer_bar_of(rank_facts.bars)
    is_named_so = outer_bar is not None and "epoch" in outer_bar.description.lower()
    return bool(rank_facts.epoch) or is_named_so


def steps_in_all(rank_facts: RankFacts, current_time: float) -> int | None:
    """How many steps a rank will have taken in the end; None where that is not known."""
    around = epochs_around(rank_facts, current_time)
    if around is None or not rank_facts.total_batches or rank_facts.steps is None:
        return None
    if rank_facts.outer is None and around.round_steps != rank_facts.batches:
        return None  # other loops have counted steps, too: how many is not known of a drawn bar
    left_batches = max(0, rank_facts.total_batches - rank_facts.batches)
    if around.done:
        per_epoch = round(around.done_steps / around.done)
        left_batches = max(left_batches, per_epoch - around.round_steps)
    else:
        per_epoch = around.round_steps + left_batches
    return rank_facts.steps + left_batches + per_epoch * max(0, around.total - around.done - 1)


def most_left(all_ranks: Iterable[RankFacts], current_time: float) -> TimeLeft | None:
    """What the slowest rank has left; None where nothing is known."""
    estimates = [
        estimate
        for rank_facts in all_ranks
        if (estimate := _rank_left(rank_facts, current_time)) is not None
    ]
    return max(estimates, key=lambda left: (not left.of_what, left.seconds), default=None)


def _rank_left(rank_facts: RankFacts, current_time: float) -> TimeLeft | None:
    around = epochs_around(rank_facts, current_time)
    loop_s = _loop_left_s(rank_facts, current_time)
    if around is not None and around.total > around.done:
        whole_s = _whole_left_s(rank_facts, around, loop_s, current_time)
        return None if whole_s is None else TimeLeft(seconds=whole_s, of_what="")
    outer_s = _outer_bar_left_s(rank_facts, current_time)
    if outer_s is not None:
        return TimeLeft(seconds=outer_s, of_what="")
    if loop_s is None:
        return None
    is_epoch = bool(rank_facts.epoch) and not rank_facts.loop_name
    return TimeLeft(seconds=loop_s, of_what="epoch" if is_epoch else "loop")


def _outer_bar_left_s(rank_facts: RankFacts, current_time: float) -> float | None:
    """What a bar says by itself of the whole training; None where that is not its bar."""
    outer_bar = outer_bar_of(rank_facts.bars)
    is_whole = rank_facts.bar_is_whole or (len(rank_facts.bars) > 1 and not rank_facts.epoch)
    if outer_bar is None or outer_bar.left_s is None or not is_whole or outer_bar.is_complete:
        return None
    seen_bar = rank_facts.seen_bar
    since_s = 0.0 if seen_bar is None else max(0.0, current_time - seen_bar.seen_at)
    return max(0.0, outer_bar.left_s - since_s)


def _whole_left_s(
    rank_facts: RankFacts, around: OuterLoop, loop_s: float | None, current_time: float
) -> float | None:
    epochs = around.total - around.done - 1
    if around.done and around.done_s > 0:
        per_epoch_s = around.done_s / around.done
        # An epoch that takes longer than those before it is not over for that.
        return max(per_epoch_s - around.round_s, loop_s or 0.0) + per_epoch_s * epochs
    if loop_s is None:
        return None
    return loop_s + _first_epoch_s(rank_facts, around, loop_s, current_time) * epochs


def _first_epoch_s(
    rank_facts: RankFacts, around: OuterLoop, loop_s: float, current_time: float
) -> float:
    """What the first epoch will have taken."""
    pace = rank_facts.pace.recent(current_time)
    if rank_facts.total_batches and pace and around.round_steps <= rank_facts.batches:
        # Its first loop: at the pace of now, which a slow start does not count in.
        return rank_facts.total_batches / pace
    inner_bar = next((bar for bar in reversed(rank_facts.bars) if bar.left_s == loop_s), None)
    if not rank_facts.total_batches and inner_bar is not None and inner_bar.elapsed_s is not None:
        return inner_bar.elapsed_s + loop_s
    return around.round_s + loop_s


def _loop_left_s(rank_facts: RankFacts, current_time: float) -> float | None:
    """What is left of the innermost loop."""
    if rank_facts.total_batches is not None:
        batch_rate = rank_facts.pace.recent(current_time)
        left_batches = rank_facts.total_batches - rank_facts.batches
        return left_batches / batch_rate if batch_rate and left_batches > 0 else None
    open_bars = [bar for bar in rank_facts.bars if not bar.is_complete]
    return next((bar.left_s for bar in reversed(open_bars) if bar.left_s is not None), None)
