"""From facts to text: what is wrong, the panel of a terminal, words that all forms share."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base.units import (
    count_noun,
    format_bytes,
    format_number,
    format_seconds,
    number_ranges,
)
from nbaccel.output.panel.facts import (
    ENDED_RUNS,
    RankFacts,
    RunBoard,
    epochs_around,
    is_over_epochs,
    mean,
    most_left,
    steps_in_all,
    throughput,
)
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


MOST_ROWS = 8  # more rows of ranks are not readable
LINE_CHARS = 72
LABEL_CHARS = 24
# Terminal sequences mean nothing in HTML and would count as characters of the width.
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]")


def live_line(board: RunBoard) -> str:
    """All ranks in one line: `2 ranks · 12.0 s · epoch 3 of 14 · step 840 (70/s) · loss 0.41`."""
    return " · ".join([count_noun(len(board.ranks), "rank"), *live_parts(board)])


def live_parts(board: RunBoard) -> list[str]:
    """The parts of the line but for the first, which says how many ranks there are."""
    # `epoch 3 of 14, 29.0 s left`, or `epoch 3, 2.0 s left in this epoch`
    loop = _epoch_words(board)
    if (left := most_left(board.ranks.values(), board.now)) is not None:
        of_words = f" in this {left.of_what}" if left.of_what else ""
        loop.append(f"{format_seconds(max(1.0, round(left.seconds)))} left{of_words}")
    parts = (format_seconds(board.seconds), ", ".join(loop), *_training_words(board))
    return [part for part in parts if part]


def _epoch_words(board: RunBoard) -> list[str]:
    """`epoch 3 of 14` and what the loop is called, as far as there is either."""
    in_loops = [facts for facts in board.ranks.values() if facts.told.epoch or facts.told.bars]
    # Often a single rank draws the bar around the loop.
    facts = next(
        (facts for facts in in_loops if epochs_around(facts, board.now) is not None),
        board.leading_rank,
    )
    if facts is None:
        return []
    label = plain_text(facts.loop_label, LABEL_CHARS)
    epoch = epoch_of(facts, board.now)
    if not epoch:
        return [label] if label else []
    # A name such as "epoch 3" would say it twice.
    is_told = not facts.told.loop_name or "epoch" in facts.told.loop_name.lower()
    return [epoch] if is_told else [epoch, label]


def epoch_of(facts: RankFacts, now: float) -> str:
    """`epoch 3 of 14`; empty where it is not known how many there are."""
    around = epochs_around(facts, now)
    if around is None or not is_over_epochs(facts):
        return ""
    return f"epoch {min(around.done + 1, around.total):,} of {around.total:,}"


def _training_words(board: RunBoard) -> list[str]:
    parts = []
    leading = board.leading_rank
    if leading is not None:
        in_all = steps_in_all(leading, board.now)
        rate = leading.pace.overall
        parts = step_words(
            leading.told.steps, in_all, rate, board.samples_per_s, compile_words(leading)
        )
    if names := board.metric_names():
        # Ranks may log different metrics, and only equal ones have a mean.
        histories = [facts.histories.get(names[0]) for facts in board.ranks.values()]
        last = [one.last for one in histories if one is not None and one.last is not None]
        parts.append(f"{plain_text(names[0], LABEL_CHARS)} {format_number(mean(last))}")
    return parts


def step_words(
    steps: int | None,
    in_all: int | None,
    rate: float | None,
    samples_per_s: float | None,
    compiled: str,
) -> list[str]:
    """`step 280 of 840 (70/s)`, `560 samples/s`, `3 programs compiled in 2.0 s`."""
    parts = []
    # 0 of a function that only has times to tell: it counts no steps.
    if steps:
        of_words = f" of {in_all:,}" if in_all is not None else ""
        speed = f" ({rate_text(rate)}/s)" if rate is not None else ""
        parts.append(f"step {steps:,}{of_words}{speed}")
        if samples_per_s:
            parts.append(f"{rate_text(samples_per_s)} samples/s")
    return [*parts, compiled] if compiled else parts


def compile_words(facts: RankFacts) -> str:
    """What a device's compiler is doing, or has done; empty for nothing."""
    if facts.told.phase or not facts.told.programs:
        return facts.told.phase
    programs = count_noun(facts.told.programs, "program")
    return f"{programs} compiled in {format_seconds(facts.told.compile_s)}"


def left_out_sentence(board: RunBoard) -> str:
    """Which metrics are not drawn because there are too many; empty where all are."""
    most = max(board.ranks.values(), key=lambda facts: facts.told.num_left_out, default=None)
    if most is None or not most.told.num_left_out:
        return ""
    names = [plain_text(name, LABEL_CHARS) for name in most.told.left_out]
    if most.told.num_left_out > len(names):
        names.append("…")
    is_one = most.told.num_left_out == 1
    subject = "1 more metric is" if is_one else f"{most.told.num_left_out:,} more metrics are"
    return f"{subject} not drawn (the first {len(most.metrics)} are): {', '.join(names)}"


def live_text(board: RunBoard) -> str:
    """The run as lines: the summary, and one for each thing that some rank does."""
    groups: dict[str, list[RankFacts]] = {}
    for facts in board.ranks.values():
        if facts.state:  # else it has not been looked at yet
            groups.setdefault(facts.doing or facts.state, []).append(facts)
    lines = [
        f"[{number_ranges([facts.rank for facts in group])}] "
        + " · ".join([activity, *_least_progress(group), _held_words(group, board)])
        for activity, group in groups.items()
    ]
    if len(lines) > MOST_ROWS:
        lines = [*lines[:MOST_ROWS], f"… and {len(lines) - MOST_ROWS} more"]
    advice = [f"! {sentence}" for sentence in advice_of(board)]
    return "\n".join([live_line(board), *advice, *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    """How far a loop of a rank is."""

    label: str
    fraction: float | None  # from 0 to 1; None where the total is not known
    done: str  # `412 of 650`, `12`, or the text of a line that is rewritten in place

    @property
    def words(self) -> str:
        """`epoch 3, 412 of 650`."""
        return f"{self.label}, {self.done}" if self.label else self.done

    def __str__(self) -> str:
        """`epoch 3, 63 % (412 of 650)`."""
        words = f"{self.label}, " if self.label else ""
        if self.fraction is None:
            return f"{words}{self.done}"
        return f"{words}{self.fraction * 100:.0f} % ({self.done})"


def progress_of(facts: RankFacts) -> list[ShownProgress]:
    """How far a rank's loops are: those that it reports, other bars, and lines drawn in place."""
    loops = []
    loop = facts.told
    # One that was only seen may be the one whose bar the function draws.
    if loop.epoch and not (loop.loop_is_seen and loop.bars):
        total = loop.total_batches
        label = "" if loop.loop_name else epoch_of(facts, loop.time)
        loops.append(
            ShownProgress(
                label=label or plain_text(facts.loop_label, LABEL_CHARS),
                fraction=min(1.0, loop.batches / total) if total else None,
                done=f"{loop.batches:,}" + (f" of {total:,}" if total else ""),
            )
        )
    bars = [
        ShownProgress(
            label=plain_text(bar.description, LABEL_CHARS),
            fraction=bar.fraction,
            done=f"{bar.done} of {bar.total}" if bar.total else bar.done,
        )
        for bar in loop.bars
        if not bar.is_elsewhere
    ]
    lines = [
        ShownProgress(label="", fraction=None, done=plain_text(line, LINE_CHARS))
        for line in facts.rewritten_lines
    ]
    return [*loops, *bars, *lines]


def _least_progress(ranks: Sequence[RankFacts]) -> list[str]:
    """`epoch 3, 63 % (412 of 650)`, of the rank that is least far; nothing for no loop."""
    loops_of_ranks = [loops for facts in ranks if (loops := progress_of(facts))]
    least_far = min(loops_of_ranks, key=lambda loops: loops[0].fraction or 0.0, default=[])
    return [str(loop) for loop in least_far]


def _held_words(ranks: Sequence[RankFacts], board: RunBoard) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    words = memory_range([facts.memory.rss for facts in ranks])
    if board.host_total_bytes:
        words += f" of {format_bytes(board.host_total_bytes)}"
    on_device = [held for facts in ranks if (held := facts.memory.device) is not None]
    if not on_device:
        return words
    totals = [total for facts in ranks if (total := facts.memory.device_total)]
    of_words = f" of {memory_range(totals)}" if totals else ""
    return f"{words}, on the device {memory_range(on_device)}{of_words}"


def memory_range(sizes: Sequence[int]) -> str:
    """From least to most: `0.9 GiB to 1.2 GiB`, or `1.0 GiB` where they are alike."""
    least = format_bytes(min(sizes))
    most = format_bytes(max(sizes))
    return most if least == most else f"{least} to {most}"


def filled_columns(columns: Mapping[str, Sequence[str]], first: str) -> list[list[str]]:
    """A table's rows: columns without a value, but for the first, would only take space."""
    cells = {
        name: texts if name == first else [text or "-" for text in texts]
        for name, texts in columns.items()
        if name == first or any(texts)
    }
    return [[*row] for row in zip(*([name, *texts] for name, texts in cells.items()), strict=True)]


def plain_text(text: str, max_chars: int, *, keeps_start: bool = False) -> str:
    """A text without control characters, cut to a width."""
    # Cut first: a line may have megabytes, and control characters take few of them.
    text = _CONTROL_CHARACTERS.sub("", text[: 8 * max_chars].replace("\t", "    "))
    text = text.rstrip() if keeps_start else text.strip()
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def rate_text(rate: float | None) -> str:
    """A speed, to be read at a glance; empty where it is not known."""
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
