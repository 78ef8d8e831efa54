"""A run that goes on, as HTML and as text; what is wrong with it; words that all forms share."""

from __future__ import annotations

import html
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base import units
from nbaccel.output.panel.curves import ACCENT_COLOUR, is_logarithmic, metric_chart
from nbaccel.output.panel.facts import (
    ENDED_RUNS,
    TIME_KINDS,
    RankFacts,
    RankTimes,
    RunBoard,
    epochs_around,
    is_over_epochs,
    mean,
    most_left,
    percent_of,
    steps_in_all,
    throughput,
)

_LEAST_S = 2.0  # of training, before its shares mean something
_LEAST_DATA_SHARE = 0.3
_LEAST_GAIN = 1.2  # below it more ranks are hardly faster


def advice_of(board: RunBoard) -> list[str]:
    """Sentences, the most urgent first; none where nothing is wrong."""
    times = [one for one in board.times.by_rank().values() if one.steady_s >= _LEAST_S]
    return [*_no_numbers(board), *_alone(board, times), *_data(times), *_not_worth(board)]


def _no_numbers(board: RunBoard) -> Iterator[str]:
    """Of a loss that is no number any more: since when."""
    for facts in board.ranks.values():
        points = facts.loss.points()
        if not points or math.isfinite(points[-1][1]):
            continue
        finite = [place for place, (_, value) in enumerate(points) if math.isfinite(value)]
        step, value = points[finite[-1] + 1 if finite else 0]
        yield (
            f"{facts.loss_name} is {value} since step {step:,.0f}: what follows trains nothing. "
            "Stop, and try a smaller learning rate, clip_grad_norm_, or bf16 in place of fp16."
        )
        return  # the other ranks' are the same


def _alone(board: RunBoard, times: Sequence[RankTimes]) -> Iterator[str]:
    """Of several ranks that have trained, and none was ever in a process group."""
    ranks = board.ranks.values()
    if (
        len(times) == len(ranks) > 1
        and all(facts.told.steps and facts.histories for facts in ranks)
        and not any(one.told.had_group for one in ranks)
    ):
        yield (
            f"Ranks {units.number_ranges(board.ranks)} have exchanged nothing: each trains a model "
            "of its own. Accelerator.prepare or DistributedDataParallel makes them train one."
        )


def _data(times: Sequence[RankTimes]) -> Iterator[str]:
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
        ranks = units.count_noun(num_before, "rank")
        yield (
            f"{len(board.ranks)} ranks do {rate / rate_before:.2f} times the samples per second of "
            f"{ranks} (an earlier run of {board.title}), which is not worth it. Use "
            f"num_processes={num_before}, larger batches, or a device for each rank."
        )


MOST_ROWS = 8  # more rows of ranks are not readable
LINE_CHARS = 72
LABEL_CHARS = 24


def live_line(board: RunBoard) -> str:
    """All ranks in one line: `2 ranks · 12.0 s · epoch 3 of 14 · step 840 (70/s) · loss 0.41`."""
    return " · ".join([units.count_noun(len(board.ranks), "rank"), *live_parts(board)])


def live_parts(board: RunBoard) -> list[str]:
    """The parts of the line but for the first, which says how many ranks there are."""
    # `epoch 3 of 14, 29.0 s left`, or `epoch 3, 2.0 s left in this epoch`
    loop = _epoch_words(board)
    if (left := most_left(board.ranks.values(), board.now)) is not None:
        of_words = f" in this {left.of_what}" if left.of_what else ""
        loop.append(f"{units.format_seconds(max(1.0, round(left.seconds)))} left{of_words}")
    parts = (units.format_seconds(board.seconds), ", ".join(loop), *_training_words(board))
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
    label = units.plain_text(facts.loop_label, LABEL_CHARS)
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
        parts.append(f"{units.plain_text(names[0], LABEL_CHARS)} {units.format_number(mean(last))}")
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
    programs = units.count_noun(facts.told.programs, "program")
    return f"{programs} compiled in {units.format_seconds(facts.told.compile_s)}"


def left_out_sentence(board: RunBoard) -> str:
    """Which metrics are not drawn because there are too many; empty where all are."""
    most = max(board.ranks.values(), key=lambda facts: facts.told.num_left_out, default=None)
    if most is None or not most.told.num_left_out:
        return ""
    names = [units.plain_text(name, LABEL_CHARS) for name in most.told.left_out]
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
        f"[{units.number_ranges([facts.rank for facts in group])}] "
        + " · ".join([activity, *map(str, _least_progress(group)), _held_words(group, board)])
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
                label=label or units.plain_text(facts.loop_label, LABEL_CHARS),
                fraction=min(1.0, loop.batches / total) if total else None,
                done=f"{loop.batches:,}" + (f" of {total:,}" if total else ""),
            )
        )
    bars = [
        ShownProgress(
            label=units.plain_text(bar.description, LABEL_CHARS),
            fraction=bar.fraction,
            done=f"{bar.done} of {bar.total}" if bar.total else bar.done,
        )
        for bar in loop.bars
        if not bar.is_elsewhere
    ]
    lines = [
        ShownProgress(label="", fraction=None, done=units.plain_text(line, LINE_CHARS))
        for line in facts.rewritten_lines
    ]
    return [*loops, *bars, *lines]


def _least_progress(ranks: Sequence[RankFacts]) -> list[ShownProgress]:
    """Of the rank that is least far; nothing for no loop."""
    loops_of_ranks = filter(None, map(progress_of, ranks))
    return min(loops_of_ranks, key=lambda loops: loops[0].fraction or 0.0, default=[])


def _held_words(ranks: Sequence[RankFacts], board: RunBoard) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    words = memory_range([facts.memory.rss for facts in ranks])
    if board.host_total_bytes:
        words += f" of {units.format_bytes(board.host_total_bytes)}"
    on_device = [held for facts in ranks if (held := facts.memory.device) is not None]
    if not on_device:
        return words
    totals = [total for facts in ranks if (total := facts.memory.device_total)]
    of_words = f" of {memory_range(totals)}" if totals else ""
    return f"{words}, on the device {memory_range(on_device)}{of_words}"


def memory_range(sizes: Sequence[int]) -> str:
    """From least to most: `0.9 GiB to 1.2 GiB`, or `1.0 GiB` where they are alike."""
    least = units.format_bytes(min(sizes))
    most = units.format_bytes(max(sizes))
    return most if least == most else f"{least} to {most}"


def filled_columns(columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A table's rows: columns without a value, but for the ranks', would only take space."""
    filled = [
        [name, *(text or "-" for text in texts)]
        for name, texts in columns.items()
        if name == "rank" or any(texts)
    ]
    return [[*row] for row in zip(*filled, strict=True)]


def rate_text(rate: float | None) -> str:
    """A speed, to be read at a glance; empty where it is not known."""
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


PANEL_STYLE = "font-size:0.9em;line-height:1.5"
QUIET_STYLE = "opacity:0.65"
ADVICE_COLOUR = "#d9730d"  # beside the text: seen on light and on dark
# The display is that of browsers, which Notebook 6 takes the triangle from.
SUMMARY_STYLE = "cursor:pointer;display:list-item"
_CELL_STYLE = (
    "text-align:left;vertical-align:top;padding:0.1em 1.2em 0.1em 0;border:none;background:none;"
    "font-weight:normal;white-space:nowrap;max-width:none;font-variant-numeric:tabular-nums"
)
_LINES_STYLE = (
    "margin:0.3em 0 0 0;padding:0.3em 0;white-space:pre-wrap;"
    "overflow-wrap:anywhere;line-height:1.35;background:none"
)
_TIME_ROW_STYLE = "display:flex;align-items:center;gap:10px;margin:4px 0;max-width:640px"
# White lines on the colour, in another direction for each: no colour is needed to tell them apart.
_STRIPES = "repeating-linear-gradient({angle},rgba(255,255,255,0.45) 0 2px,transparent 2px 6px)"
_BAR_LOOKS = {
    "computing": "background-color:#1976d2",
    "communicating": f"background-color:#d9730d;background-image:{_STRIPES.format(angle='45deg')}",
    "waiting for data": (
        f"background-color:#8e44ad;background-image:{_STRIPES.format(angle='90deg')}"
    ),
    "waiting for others": (
        f"background-color:#7b8794;background-image:{_STRIPES.format(angle='45deg')},"
        f"{_STRIPES.format(angle='135deg')}"
    ),
}
"""Colour and pattern apart: of a notebook that is not trusted JupyterLab drops the patterns."""
_MOST_BARS = 16


def quiet(text: str) -> str:
    """A text of less weight."""
    return f'<span style="{QUIET_STYLE}">{html.escape(text)}</span>'


def folded(title: str, content: str) -> str:
    """Something behind a title that unfolds it."""
    style = f"{SUMMARY_STYLE};{QUIET_STYLE}"
    return f'<details><summary style="{style}">{html.escape(title)}</summary>{content}</details>'


def advice_html(sentences: Iterable[str]) -> str:
    """What is wrong, and what to do; empty for nothing."""
    style = f"border-left:3px solid {ADVICE_COLOUR};padding-left:0.6em;margin:0.3em 0"
    return "".join(f'<div style="{style}">{html.escape(sentence)}</div>' for sentence in sentences)


def html_table(rows: Sequence[Sequence[str]], *, is_html: bool = False, rest: str = "") -> str:
    """A table; the first row and the first column are heads, and `rest` fills a row at the end."""
    if not is_html:
        rows = [[html.escape(cell) for cell in row] for row in rows]
    head, *body = rows
    lines = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL_STYLE}">{first}</th>'
        + "".join(f'<td style="{_CELL_STYLE}">{cell}</td>' for cell in cells)
        + "</tr>"
        for first, *cells in body
    )
    if rest:
        lines += (
            f'<tr style="background:none"><td colspan="{len(head)}" '
            f'style="{_CELL_STYLE};{QUIET_STYLE}">{html.escape(rest)}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col" style="{_CELL_STYLE};{QUIET_STYLE}">{cell}</th>' for cell in head
    )
    return (
        '<div style="overflow-x:auto"><table style="border:none;border-collapse:collapse;'
        'margin:0.2em 0;table-layout:auto"><thead style="border:none"><tr style="background:none">'
        f"{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def lines_block(text: str, *, scrolls: bool = True) -> str:
    """A text as it is."""
    # Front ends let a `<pre>` scroll by itself, and would show the start of it.
    style = "max-height:14em;overflow:auto" if scrolls else "flex:none;overflow:visible"
    lines = [units.plain_text(line, LINE_CHARS * 4, keeps_start=True) for line in text.split("\n")]
    return f'<pre style="{_LINES_STYLE};{style}">{html.escape(chr(10).join(lines))}</pre>'


def titled(name: str, chart: str) -> str:
    """A chart below its name; empty where there is none."""
    title = quiet(units.plain_text(name, LINE_CHARS))
    return f'<div style="margin-top:0.3em">{title}<br>{chart}</div>' if chart else ""


def rank_times_html(timed_ranks: Mapping[int, RankTimes]) -> str:
    """A bar for each rank; a table beside them says the same to screen readers."""
    longest_s = max((times.steady_s for times in timed_ranks.values()), default=0.0) or 1.0
    rows = "".join(
        f'<div style="{_TIME_ROW_STYLE}"><div style="width:4.5em">rank {rank}</div>'
        f"{_time_bar(times.parts, longest_s)}</div>"
        for rank, times in itertools.islice(timed_ranks.items(), _MOST_BARS)
    )
    return f'<div aria-hidden="true">{rows}{_time_legend(TIME_KINDS)}</div>'


def mean_time_html(timed_ranks: Mapping[int, RankTimes]) -> str:
    """One bar for all ranks together, with the part of each kind; empty where none is known."""
    seconds = {kind: sum(one.parts[kind] for one in timed_ranks.values()) for kind in TIME_KINDS}
    total_s = sum(seconds.values())
    if total_s <= 0:
        return ""
    words = [f"{kind} {percent_of(part_s, total_s)}" for kind, part_s in seconds.items()]
    bar = _time_bar(seconds, total_s)
    return f'<div style="{_TIME_ROW_STYLE}">{quiet("time")}{bar}</div>{_time_legend(words)}'


def _time_bar(seconds: Mapping[str, float], full_s: float) -> str:
    parts = "".join(
        f'<div title="{kind}: {units.format_seconds(part_s)}" '
        f'style="width:{100 * part_s / full_s:.2f}%;{_BAR_LOOKS[kind]}"></div>'
        for kind, part_s in seconds.items()
        if part_s > 0
    )
    style = "flex:1;display:flex;height:14px;border-radius:3px;overflow:hidden"
    return f'<div aria-hidden="true" style="{style}">{parts}</div>'


def _time_legend(words: Iterable[str]) -> str:
    # Where styles are dropped, the blanks between keep the words apart.
    entries = " ".join(
        '<span style="display:inline-flex;align-items:center;gap:6px">'
        '<span aria-hidden="true" style="display:inline-block;width:18px;height:12px;'
        f'border-radius:2px;{looks}"></span>{html.escape(text)}</span>'
        for text, looks in zip(words, _BAR_LOOKS.values(), strict=True)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 8px">{entries}</div>'


_STOP_HTML = (
    '<span class="nbaccel-stop-words" style="opacity:0.8">Stop: interrupt the cell (■)</span>'
)
"""Where the panel's script can put a button, it does so."""
_SAME_S = 2.0
_MOST_CHARTS = 6  # they are sent every second

_ROW_STYLE = "display:flex;flex-wrap:wrap;gap:0 1em"
# A grey that lets any background through, as the empty part of a bar.
_TRACK_STYLE = (
    "display:inline-block;vertical-align:middle;width:7em;height:0.6em;border-radius:0.3em;"
    "overflow:hidden;margin-right:0.6em;background:rgba(128,128,128,0.3)"
)
_FILL_STYLE = f"display:block;height:100%;background:{ACCENT_COLOUR}"
_STATES_WORST_FIRST = ("failed", "gone", "ended", "stopping", "starting", "running")


def live_html(board: RunBoard, *, is_stoppable: bool) -> str:
    """The run while it goes on."""
    words = html.escape(" · ".join(live_parts(board)))
    headline = f"<b>{units.count_noun(len(board.ranks), 'rank')}</b> · {words}"
    stop = _STOP_HTML if is_stoppable else ""
    # Side by side where there is room, below each other where there is not.
    figures = f"{ranks_html(board)}{mean_time_html(board.times.by_rank())}"
    return (
        f'<div style="{PANEL_STYLE}"><div style="{_ROW_STYLE};align-items:center">'
        f'<span style="flex:1 1 20em">{headline}</span>{stop}</div>{advice_html(advice_of(board))}'
        f'<div style="{_ROW_STYLE}"><div style="flex:0 1 auto;min-width:0">{figures}</div>'
        f'<div style="flex:1 1 24em;max-width:36em">{_charts(board)}</div></div>'
        f"{printed_html(board)}</div>"
    )


def printed_html(board: RunBoard) -> str:
    """Metrics that are not drawn, and messages of libraries."""
    left_out = left_out_sentence(board)
    messages = board.library_messages
    title = f"{units.count_noun(messages.count, 'message')} of libraries"
    return (f"<div>{quiet(left_out)}</div>" if left_out else "") + (
        folded(title, lines_block("\n".join(messages.lines()))) if messages.count else ""
    )


def _charts(board: RunBoard) -> str:
    first, *others = board.metric_names() or [""]
    curves = board.curves(first)
    is_log = is_logarithmic(y for points in curves.values() for _, y in points)
    content = titled(first, metric_chart(curves, first, board.marks))
    if content:
        other_axis = metric_chart(curves, first, board.marks, log_y=not is_log)
        content += folded("linear axis" if is_log else "logarithmic axis", other_axis)
    charts = [
        titled(name, metric_chart(board.curves(name), name, board.marks))
        for name in others[:_MOST_CHARTS]
    ]
    if any(charts):
        content += folded(units.count_noun(len(charts), "other metric"), "".join(charts))
    return content


def ranks_html(board: RunBoard) -> str:
    """The ranks, a row each."""
    shown, others = _shown_ranks(board)
    columns = {"rank": [str(facts.rank) for facts in shown]}
    columns |= {name: [cell(one, board) for one in shown] for name, cell in _COLUMNS.items()}
    rows = filled_columns(columns)
    names = {_LOSS_COLUMN: html.escape(_common_loss_name(board)) or _LOSS_COLUMN}
    if board.host_total_bytes:  # all ranks share it
        names["memory"] = f"memory of {units.format_bytes(board.host_total_bytes)}"
    rows[0] = [names.get(name, name) for name in rows[0]]
    return html_table(rows, is_html=True, rest=_rest_words(others) if others else "")


def _shown_ranks(board: RunBoard) -> tuple[list[RankFacts], list[RankFacts]]:
    """The ranks that get a row, and those that share the last one: the worst are shown first."""
    ranks = list(board.ranks.values())
    if len(ranks) <= MOST_ROWS:
        return ranks, []

    def attention_need(facts: RankFacts) -> tuple[int, float, int]:
        # Ranks that report no steps come behind those that are slow.
        steps = math.inf if facts.told.steps is None else facts.told.steps
        return [*_STATES_WORST_FIRST, facts.state].index(facts.state), steps, facts.rank

    by_need = sorted(ranks, key=attention_need)
    return by_need[:MOST_ROWS], by_need[MOST_ROWS:]


def _rest_words(ranks: Sequence[RankFacts]) -> str:
    states = sorted({facts.state for facts in ranks})
    parts = [f"and {units.count_noun(len(ranks), 'more rank')}: {', '.join(states)}"]
    steps = [facts.told.steps for facts in ranks if facts.told.steps is not None]
    if steps:
        least = min(steps)
        most = max(steps)
        parts.append(f"step {most:,}" if least == most else f"steps {least:,} to {most:,}")
    parts.append(memory_range([facts.memory.rss for facts in ranks]))
    return " · ".join(parts)


def _state_cell(facts: RankFacts, board: RunBoard) -> str:
    """`training`, or `waiting in all_reduce, 12.0 s` with the line of code below it."""
    activity, _, place = facts.doing.partition(" (")
    words = units.plain_text(facts.told.phase or activity or facts.state, LINE_CHARS)
    # Not where that is the whole run, whose length the first line has.
    if facts.since >= board.began + _SAME_S:
        words += f", {units.format_seconds(max(0.0, board.now - facts.since))}"
    if not place:
        return html.escape(words)
    place = html.escape(units.plain_text(place.removesuffix(")"), LINE_CHARS))
    place_html = f'<span style="{QUIET_STYLE};font-family:monospace">{place}</span>'
    return f"{html.escape(words)}<br>{place_html}"


def _progress_html(loop: ShownProgress) -> str:
    if loop.fraction is None:
        return html.escape(str(loop))
    # The words say what the bar shows: a bar alone would say nothing to a screen reader.
    bar = f'<span style="{_FILL_STYLE};width:{loop.fraction:.1%}"></span>'
    return (
        f'<span style="{_TRACK_STYLE}">{bar}</span>{loop.fraction * 100:.0f} %<br>'
        f"{quiet(loop.words)}"
    )


def _loss_cell(facts: RankFacts, board: RunBoard) -> str:
    if facts.loss.last is None:
        return ""
    label = "" if _common_loss_name(board) else f"{units.plain_text(facts.loss_name, LABEL_CHARS)} "
    return html.escape(f"{label}{units.format_number(facts.loss.last)}")


def _common_loss_name(board: RunBoard) -> str:
    """The name of the loss's column, too; empty where ranks log different metrics."""
    names = {facts.loss_name for facts in board.ranks.values()} - {""}
    return units.plain_text(names.pop(), LABEL_CHARS) if len(names) == 1 else ""


def _other_metrics(facts: RankFacts, board: RunBoard) -> str:
    others = [
        f"{name} {units.format_number(value)}"
        for name, value in facts.metrics.items()
        if name != facts.loss_name
    ]
    return html.escape(units.plain_text(", ".join(others[:3]), LINE_CHARS))


def _device_cell(facts: RankFacts, board: RunBoard) -> str:
    memory = facts.memory
    if memory.device is None:
        return ""
    total = memory.device_total
    of_total = f"<br>{quiet(f'of {units.format_bytes(total)}')}" if total else ""
    return f"{units.format_bytes(memory.device)}{of_total}"


_LOSS_COLUMN = "loss"
_COLUMNS: dict[str, Callable[[RankFacts, RunBoard], str]] = {
    "progress": lambda facts, _: "<br>".join(map(_progress_html, progress_of(facts))),
    "state": _state_cell,
    # Where a loop shows how far a rank is, the first line's step is enough.
    "step": lambda facts, _: (
        f"{facts.told.steps:,}" if facts.told.steps and not progress_of(facts) else ""
    ),
    "steps/s": lambda facts, board: rate_text(facts.pace.recent(board.now)),
    "samples/s": lambda facts, board: (
        rate_text(facts.samples_pace.recent(board.now)) if facts.told.samples else ""
    ),
    _LOSS_COLUMN: _loss_cell,
    "metrics": _other_metrics,
    "memory": lambda facts, _: units.format_bytes(facts.memory.rss) if facts.memory.rss else "",
    "on device": _device_cell,
}
"""From a column's name to the HTML of a rank's cell, which is empty for no value."""
