"""tqdm's bars, drawn by tqdm itself and read again."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from nbaccel.output.bars import BarText, RankBars, read_bar, split_bar


def drawn(count: int, total: int | None, **settings: Any) -> str:
    """What tqdm draws of a loop of which so much is done."""
    screen = io.StringIO()
    bar = tqdm(total=total, file=screen, mininterval=0, **settings)
    bar.start_t = time.time() - 10
    bar.update(count)
    text = str(bar)
    bar.close()
    return text


@pytest.mark.parametrize(
    ("count", "total", "settings", "words"),
    [
        (2, 5, {}, ("", 0.4, "2", "5")),
        (2, 5, {"desc": "inside"}, ("inside", 0.4, "2", "5")),
        (5, 5, {"desc": "epoch 3: train"}, ("epoch 3: train", 1.0, "5", "5")),
        (0, 5, {"desc": "first"}, ("first", 0.0, "0", "5")),
        (1500, 4000, {"unit_scale": True, "unit": "B"}, ("", 0.37, "1.50k", "4.00k")),
        (7, 9, {"ascii": True, "desc": "ascii"}, ("ascii", 0.77, "7", "9")),
        (7, 9, {"postfix": {"loss": 0.3, "acc": "50%"}}, ("", 0.77, "7", "9")),
        (12, None, {}, ("", None, "12", "")),
        (12, None, {"desc": "rows", "unit": "row"}, ("rows", None, "12", "")),
    ],
)
def test_what_tqdm_draws_is_read(
    count: int, total: int | None, settings: dict[str, Any], words: tuple[Any, ...]
) -> None:
    text = drawn(count, total, **settings)
    bar = read_bar(text)
    assert bar is not None, text
    assert (bar.description, bar.fraction, bar.done, bar.total) == pytest.approx(words, abs=0.011)
    assert bar.text == text


def test_rate_postfix_and_what_is_left_are_read() -> None:
    bar = read_bar("x:  50%|█████     | 30/60 [01:00<1:02:03,  1.9it/s, loss=0.3, acc=[1]]")
    assert bar is not None
    assert (bar.rate, bar.postfix, bar.left_s) == ("1.9it/s", "loss=0.3, acc=[1]", 3723.0)
    unknown = read_bar("  0%|          | 0/60 [00:00<?, ?it/s]")
    assert unknown is not None
    assert (unknown.rate, unknown.left_s) == ("?it/s", None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 0.3 [best]",
        "50%|",
        "accuracy 50%| of 3/4 [so far]",
        "[1, 2, 3]",
        "5 of 9 done [00:01]",
        "it [is, what/ever]",
        "x" * 5000 + "]",
    ],
)
def test_other_lines_are_no_bars(text: str) -> None:
    assert read_bar(text) is None
    assert split_bar(text) == (None, text)


@given(st.text(alphabet="0123456789%|/[]<,: its\t?xX", max_size=200))
def test_any_line_is_read_or_not_and_nothing_of_it_is_lost(text: str) -> None:
    bar, rest = split_bar(text)
    assert (bar.text if bar is not None else "") + rest == text


def test_a_line_logged_while_a_bar_is_drawn_is_apart_from_it() -> None:
    text = drawn(2, 5, desc="train")
    bar, rest = split_bar(f"{text}WARNING: learning rate [0.1] is high")
    assert bar is not None
    assert (bar.text, rest) == (text, "WARNING: learning rate [0.1] is high")


def bar_of(name: str, fraction: float) -> BarText:
    return BarText(text=f"{name} {fraction}", description=name, fraction=fraction)


def names(bars: tuple[BarText, ...]) -> list[str]:
    return [bar.description for bar in bars]


def test_an_inner_loop_and_the_one_around_it_are_shown() -> None:
    bars = RankBars()
    for epoch in range(3):
        bars.note(bar_of("epochs", epoch / 3))
        bars.note(bar_of("batches", 0.5))
    assert names(bars.shown([])) == ["epochs", "batches"]


def test_a_loop_that_is_through_makes_room() -> None:
    bars = RankBars()
    bars.note(bar_of("download", 1.0))
    assert names(bars.shown([])) == ["download"]
    bars.note(bar_of("train", 0.1))
    assert names(bars.shown([])) == ["train"]


def test_many_loops_are_the_newest_two() -> None:
    bars = RankBars()
    for name in "abcd":
        bars.note(bar_of(name, 0.5))
    assert names(bars.shown([])) == ["c", "d"]


def test_what_is_rewritten_and_no_bar_is_shown_as_its_text() -> None:
    bars = RankBars()
    shown = bars.shown(["", "   ", "half of 3", drawn(1, 2, desc="t")])
    assert [bar.text for bar in shown][-1] == "half of 3"
    assert names(shown) == ["t", ""]
    assert len(bars.shown([])) == 1, "of such a line nothing stays"
