"""A board as text: in one line, in several, and the words of which its HTML is made, too.

Curves are block characters, which are text anywhere.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges
from nbaccel.output.chart import LOGARITHMIC_RATIO
from nbaccel.output.dashboard.board import RankFacts, RunBoard, mean
from nbaccel.output.dashboard.time_left import (
    epochs_around,
    is_over_epochs,
    most_left,
    steps_in_all,
)
from nbaccel.output.tqdm_text import BATCH_UNIT

__all__ = [
    "ShownProgress",
    "leading_rank",
    "left_out_sentence",
    "live_text",
    "memory_range",
    "number_text",
    "plain_text",
    "progress_of",
    "rate_text",
    "sparkline",
    "summary_line",
    "summary_parts",
]


MOST_ROWS = 8  # more rows of ranks are not readable
CURVE_CHARS = 20
LINE_CHARS = 72
LABEL_CHARS = 24
_SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "!"
NO_VALUE = "-"
# Terminal sequences mean nothing in HTML and would count as characters of the width.
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]")


# ------------------------------------------------------------------------- one line


def summary_line(board: RunBoard, *, with_curve: bool = False, is_live: bool = False) -> str:
    """All ranks in one line: `2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 · up to 1 GiB`."""
    return " · ".join(
        [
            count_noun(len(board.ranks), "rank"),
            *summary_parts(board, with_curve=with_curve, is_live=is_live),
        ]
    )


def summary_parts(
    board: RunBoard,
    *,
    with_curve: bool = False,
    with_memory: bool = True,
    is_live: bool = False,
) -> list[str]:
    """The parts of the line but for the first, which says how many ranks there are."""
    ending_words = f"{board.ending} after " if board.ending else ""
    return [
        f"{ending_words}{format_seconds(board.seconds)}",
        *(_loop_words(board) if is_live else ()),
        *_training_words(board, with_curve=with_curve, is_live=is_live),
        *(() if is_live else _waiting_words(board)),
        *(_memory_words(board) if with_memory else ()),
    ]


def _waiting_words(board: RunBoard) -> list[str]:
    """`12 % waited for rank 0`, where one rank has held the others up."""
    slowest = board.times.slowest()
    return (
        []
        if slowest is None
        else [f"{slowest.waited_share * 100:.0f} % waited for rank {slowest.rank}"]
    )


def _loop_words(board: RunBoard) -> list[str]:
    """`epoch 3 of 14, 29.0 s left`, or `epoch 3, 2.0 s left in this epoch`."""
    words = _epoch_words(board)
    if (left := most_left(board.ranks.values(), board.now)) is not None:
        of_words = f" in this {left.of_what}" if left.of_what else ""
        words.append(f"{format_seconds(max(1.0, round(left.seconds)))} left{of_words}")
    return [", ".join(words)] if words else []


def _epoch_words(board: RunBoard) -> list[str]:
    """`epoch 3 of 14` and what the loop is called, as far as there is either."""
    with_loops = [facts for facts in board.ranks.values() if facts.epoch or facts.bars]
    # Often a single rank draws the bar around the loop.
    shown_facts = next(
        (facts for facts in with_loops if epochs_around(facts, board.now) is not None),
        leading_rank(board),
    )
    if shown_facts is None:
        return []
    around_words = epoch_of(shown_facts, board.now)
    if not around_words:
        return [plain_text(shown_facts.loop_label, LABEL_CHARS)] if shown_facts.loop_label else []
    # A name such as "epoch 3" would say it twice.
    is_told = not shown_facts.loop_name or "epoch" in shown_facts.loop_name.lower()
    name_words = [] if is_told else [plain_text(shown_facts.loop_name, LABEL_CHARS)]
    return [around_words, *name_words]


def epoch_of(rank_facts: RankFacts, current_time: float) -> str:
    """`epoch 3 of 14`; empty where it is not known how many there are."""
    around = epochs_around(rank_facts, current_time)
    if around is None or not is_over_epochs(rank_facts):
        return ""
    return f"epoch {min(around.done + 1, around.total):,} of {around.total:,}"


def _training_words(board: RunBoard, *, with_curve: bool, is_live: bool) -> list[str]:
    leading_facts = leading_rank(board)
    parts = []
    # 0 of a function that only has times to tell: it counts no steps.
    if leading_facts is not None and leading_facts.steps:
        step_rate = leading_facts.pace.overall
        speed_words = f" ({rate_text(step_rate)}/s)" if step_rate is not None else ""
        parts.append(f"{_step_words(leading_facts, board, is_live)}{speed_words}")
        parts += _sample_words(board, is_live=is_live)
    if leading_facts is not None:
        parts += _compile_words(leading_facts)
    loss_facts = [
        rank_facts for rank_facts in board.ranks.values() if rank_facts.loss.last is not None
    ]
    if loss_facts:
        # Ranks may log different metrics, and only equal ones have a mean.
        same_losses = [
            other_facts.loss.last
            for other_facts in loss_facts
            if other_facts.loss_name == loss_facts[0].loss_name
        ]
        loss = mean(value for value in same_losses if value is not None)
        loss_curve = f" {sparkline(loss_facts[0].loss.values())}" if with_curve else ""
        parts.append(f"{plain_text(loss_facts[0].loss_name, 24)} {number_text(loss)}{loss_curve}")
    return parts


def _step_words(rank_facts: RankFacts, board: RunBoard, is_live: bool) -> str:
    """`step 412`, and of how many, where more were to come."""
    in_all = steps_in_all(rank_facts, board.now)
    is_cut = is_live or (bool(board.ending) and in_all != rank_facts.steps)
    of_words = f" of {in_all:,}" if in_all is not None and is_cut else ""
    return f"step {rank_facts.steps:,}{of_words}"


def _sample_words(board: RunBoard, *, is_live: bool) -> list[str]:
    """Samples per second of all ranks: now, or over the whole run."""
    if is_live:
        rate = board.samples_per_s
    else:
        rates = [rank_facts.samples_pace.overall for rank_facts in board.ranks.values()]
        rate = math.fsum(filter(None, rates))
    return [f"{rate_text(rate)} samples/s"] if rate else []


def _compile_words(rank_facts: RankFacts) -> list[str]:
    """What a device's compiler is doing, or has done."""
    if rank_facts.phase:
        return [rank_facts.phase]
    if not rank_facts.programs:
        return []
    programs = count_noun(rank_facts.programs, "program")
    return [f"{programs} compiled in {format_seconds(rank_facts.compile_s)}"]


def leading_rank(board: RunBoard) -> RankFacts | None:
    """The lowest rank that reports its training: the others are in step with it, or silent."""
    return next(
        (rank_facts for rank_facts in board.ranks.values() if rank_facts.steps is not None),
        None,
    )


def _memory_words(board: RunBoard) -> list[str]:
    most_bytes = max((rank_facts.peak_rss_bytes for rank_facts in board.ranks.values()), default=0)
    if not most_bytes:
        return []
    memory = " each" if len(board.ranks) > 1 else ""
    device = [
        other_facts.peak_device_bytes
        for other_facts in board.ranks.values()
        if other_facts.peak_device_bytes
    ]
    beside_words = f" (on the device {format_bytes(max(device))})" if device else ""
    return [f"up to {format_bytes(most_bytes)}{memory}{beside_words}"]


def left_out_sentence(board: RunBoard) -> str:
    """Which metrics are not drawn because there are too many; empty where all are."""
    most = max(board.ranks.values(), key=lambda facts: facts.num_left_out, default=None)
    if most is None or not most.num_left_out:
        return ""
    names = [plain_text(name, LABEL_CHARS) for name in most.left_out]
    words = ["…"] if most.num_left_out > len(names) else []
    subject = (
        "1 more metric is" if most.num_left_out == 1 else f"{most.num_left_out:,} more metrics are"
    )
    return f"{subject} not drawn (the first {len(most.metrics)} are): {', '.join(names + words)}"


# ------------------------------------------------------------------------- text


def live_text(board: RunBoard) -> str:
    """The run as lines: the summary, and one for each thing that some rank does."""
    groups: dict[str, list[RankFacts]] = {}
    for rank_facts in board.ranks.values():
        if not rank_facts.state:
            # It has not been looked at yet.
            continue
        groups.setdefault(rank_facts.doing or rank_facts.state, []).append(rank_facts)
    text_lines = [
        f"[{number_ranges([rank_facts.rank for rank_facts in group_facts])}] {activity_words} · "
        f"{_progress_words(group_facts)}{_held_words(group_facts, board)}"
        for activity_words, group_facts in groups.items()
    ]
    if len(text_lines) > MOST_ROWS:
        text_lines = [*text_lines[:MOST_ROWS], f"… and {len(text_lines) - MOST_ROWS} more"]
    return "\n".join([summary_line(board, is_live=True), *text_lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    """How far a loop of a rank is."""

    label: str
    fraction: float | None
    """From 0 to 1; None where the total is not known."""
    done: str
    """`412 of 650`, `12`, or the text of a line that is rewritten in place."""

    def __str__(self) -> str:
        """`epoch 3, 63 % (412 of 650)`."""
        words = f"{self.label}, " if self.label else ""
        if self.fraction is None:
            return f"{words}{self.done}"
        return f"{words}{self.fraction:.0%} ({self.done})".replace("%", " %")


def progress_of(rank_facts: RankFacts) -> list[ShownProgress]:
    """How far a rank's loops are: what `accelerator.progress` reports, and other bars."""
    loops = []
    if rank_facts.epoch:
        total = rank_facts.total_batches
        loops.append(
            ShownProgress(
                label=_own_loop_label(rank_facts),
                fraction=None if not total else min(1.0, rank_facts.batches / total),
                done=f"{rank_facts.batches:,}" + (f" of {total:,}" if total else ""),
            )
        )
    for bar in rank_facts.bars:
        # The bar of `accelerator.progress`, which is there already.
        if bar.is_elsewhere or (rank_facts.epoch and BATCH_UNIT in bar.rate):
            continue
        words = f"{bar.done} of {bar.total}" if bar.total else bar.done or bar.text
        loops.append(
            ShownProgress(
                label=plain_text(bar.description, LABEL_CHARS),
                fraction=bar.fraction,
                done=plain_text(words, LINE_CHARS),
            )
        )
    return loops


def _own_loop_label(rank_facts: RankFacts) -> str:
    """`epoch 3 of 14`, or what the loop is called."""
    words = epoch_of(rank_facts, rank_facts.received_at) if not rank_facts.loop_name else ""
    return words or plain_text(rank_facts.loop_label, LABEL_CHARS)


def _progress_words(ranks: Sequence[RankFacts]) -> str:
    """`epoch 3, 63 % (412 of 650) · `, of the rank that is least far; empty for no loop."""
    rank_loops = [found for rank_facts in ranks if (found := progress_of(rank_facts))]
    if not rank_loops:
        return ""
    least_far = min(rank_loops, key=lambda loops: loops[0].fraction or 0.0)
    return "".join(f"{loop} · " for loop in least_far)


def _held_words(ranks: Sequence[RankFacts], board: RunBoard) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    memory_words = memory_range([rank_facts.rss_bytes for rank_facts in ranks])
    if board.host_total_bytes:
        memory_words += f" of {format_bytes(board.host_total_bytes)}"
    device = [
        rank_facts.device_bytes for rank_facts in ranks if rank_facts.device_bytes is not None
    ]
    if not device:
        return memory_words
    device_totals = [
        rank_facts.device_total_bytes for rank_facts in ranks if rank_facts.device_total_bytes
    ]
    total_words = f" of {memory_range(device_totals)}" if device_totals else ""
    return f"{memory_words}, on the device {memory_range(device)}{total_words}"


def memory_range(memory_sizes: Sequence[int]) -> str:
    """From least to most: `0.9 GiB to 1.2 GiB`, or `1.0 GiB` where they are alike."""
    least_bytes = format_bytes(min(memory_sizes))
    most_bytes = format_bytes(max(memory_sizes))
    return most_bytes if least_bytes == most_bytes else f"{least_bytes} to {most_bytes}"


# ------------------------------------------------------------------------- pieces


def sparkline(spark_values: Sequence[float]) -> str:
    """A curve in block characters, over all of the values."""
    spark_points = list(spark_values)
    if len(spark_points) > CURVE_CHARS:
        edges = [position * len(spark_points) // CURVE_CHARS for position in range(CURVE_CHARS + 1)]
        spark_points = [
            # `mean` lets a value that is not finite win, so that the curve shows it.
            mean(spark_points[first_point:last_point]) or 0.0
            for first_point, last_point in itertools.pairwise(edges)
        ]
    finite_values = [value for value in spark_points if math.isfinite(value)]
    low_value = min(finite_values, default=0.0)
    high_value = max(finite_values, default=0.0)
    if low_value > 0 and high_value / low_value >= LOGARITHMIC_RATIO:
        spark_points = [
            math.log(metric_value) if math.isfinite(metric_value) else metric_value
            for metric_value in spark_points
        ]
        low_value = math.log(low_value)
        high_value = math.log(high_value)
    return "".join(_spark_block(value, low_value, high_value) for value in spark_points)


def _spark_block(shown_value: float, low_value: float, high_value: float) -> str:
    if not math.isfinite(shown_value):
        return _NO_NUMBER
    if high_value <= low_value:
        return _SPARK_BLOCKS[3]
    # Halves first: high - low of two huge numbers would be infinite.
    share = (shown_value / 2 - low_value / 2) / (high_value / 2 - low_value / 2)
    return _SPARK_BLOCKS[min(int(share * len(_SPARK_BLOCKS)), len(_SPARK_BLOCKS) - 1)]


def plain_text(raw_text: str, max_chars: int, *, keeps_start: bool = False) -> str:
    """A text without control characters, cut to a width."""
    # Cut first: a line may have megabytes, and control characters take few of them.
    text = _CONTROL_CHARACTERS.sub("", raw_text[: 8 * max_chars].replace("\t", "    "))
    text = text.rstrip() if keeps_start else text.strip()
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def rate_text(step_rate: float) -> str:
    """A speed, to be read at a glance."""
    return f"{step_rate:,.0f}" if step_rate >= 100 else f"{step_rate:.3g}"


def number_text(value: float | None) -> str:
    """A metric's value in few characters."""
    if value is None:
        return NO_VALUE
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
