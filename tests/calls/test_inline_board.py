"""Bars of tqdm in a function of the notebook's own process: real bars, on a stream of the test."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from nbaccel.calls.inline_board import InlineBars, taking_bar_text
from nbaccel.output.bars import living_bars, numbers_of_bar


class Screen(io.StringIO):
    """Like ipykernel's stream: a class in Python, whose `write` others replace, too."""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    # No thread of tqdm's is left to later tests.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    return Screen()


@pytest.fixture
def bars(screen: Screen) -> InlineBars:
    return InlineBars()


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Bars that are closed when the test is over."""
    found: list[Any] = []
    yield found
    for bar in found:
        bar.close()


def told(bars: InlineBars) -> list[tuple[str, str, str]]:
    return [(bar.description, bar.done, bar.total) for bar in bars.shown()]


def test_bars_are_taken_and_all_other_text_comes_in_order(screen: Screen, bars: InlineBars) -> None:
    handler = logging.StreamHandler(screen)
    logger = logging.Logger("a")  # noqa: LOG001 - no other test has it
    logger.addHandler(handler)
    with taking_bar_text(screen, bars.note_text):
        for epoch in tqdm(range(2), desc="epochs", file=screen):
            for batch in tqdm(range(3), mininterval=0, leave=False, file=screen):
                if batch == 1:
                    print("printed", epoch, file=screen)
                    print(file=screen)
                    logger.warning("logged %d", epoch)
            tqdm.write(f"said {epoch}", file=screen)
    per_epoch = "printed {0}\n\nlogged {0}\nsaid {0}\n"
    assert screen.getvalue() == per_epoch.format(0) + per_epoch.format(1)
    assert told(bars) == [("epochs", "2", "2")]


def test_the_time_of_a_bar_is_known_in_fractions_of_a_second(
    screen: Screen, bars: InlineBars, opened: list[Any]
) -> None:
    with taking_bar_text(screen, bars.note_text):
        opened.append(tqdm(total=4, file=screen, mininterval=0, miniters=1))
        opened[0].start_t -= 3.7
        opened[0].update()
        (bar,) = bars.shown()
    assert (bar.done, bar.elapsed_s, bar.is_elsewhere) == ("1", pytest.approx(3.7, abs=0.1), False)
    assert "[00:03<" in bar.text


def test_what_a_loop_over_a_bar_prints_by_itself_is_no_bar(
    screen: Screen, bars: InlineBars
) -> None:
    def rows() -> Iterator[int]:
        for row in range(2):
            print("row", row, file=screen)
            yield row

    with taking_bar_text(screen, bars.note_text):
        assert list(tqdm(rows(), total=2, mininterval=0, file=screen)) == [0, 1]
    assert screen.getvalue() == "row 0\nrow 1\n"
    assert told(bars) == [("", "2", "2")]


def test_a_bar_of_another_form_is_its_text(screen: Screen, bars: InlineBars) -> None:
    with taking_bar_text(screen, bars.note_text):
        list(tqdm(range(2), bar_format="so many: {n_fmt}", file=screen))
    assert screen.getvalue() == ""
    assert [bar.text for bar in bars.shown()] == ["so many: 2"]


def test_a_stream_around_the_stream_passes_bars_on_to_the_panel(
    screen: Screen, bars: InlineBars
) -> None:
    """So do libraries that keep a log of what is printed."""
    log = io.StringIO()

    class Copying:
        def write(self, text: str) -> int:
            log.write(text)
            return self._pass_on(text)

        def _pass_on(self, text: str) -> int:
            return screen.write(text)

        def flush(self) -> None:
            screen.flush()

    with taking_bar_text(screen, bars.note_text):
        mine: Any = Copying()
        list(tqdm(range(3), file=mine))
        print("printed", file=mine)
    assert screen.getvalue() == "printed\n"
    assert "3/3" in log.getvalue()
    assert told(bars) == [("", "3", "3")]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("has_own_write", [False, True])
def test_the_stream_is_as_before(
    screen: Screen, bars: InlineBars, error: type[BaseException] | None, has_own_write: bool
) -> None:
    plain_write = screen.write
    if has_own_write:
        screen.write = lambda text: plain_write(text.upper())  # type: ignore[method-assign]
    before = dict(vars(screen))
    ends = contextlib.nullcontext() if error is None else pytest.raises(error)
    with ends, taking_bar_text(screen, bars.note_text):
        print("printed", file=screen)
        assert vars(screen) != before
        if error is not None:
            raise error
    assert vars(screen) == before
    print("later", file=screen)
    assert screen.getvalue() == ("PRINTED\nLATER\n" if has_own_write else "printed\nlater\n")


def test_a_write_that_the_function_has_replaced_stays_and_works(
    screen: Screen, bars: InlineBars
) -> None:
    with contextlib.suppress(ValueError), taking_bar_text(screen, bars.note_text):
        inner_write = screen.write
        screen.write = lambda text: inner_write(text.upper())  # type: ignore[method-assign]
        raise ValueError
    print("later", file=screen)
    list(tqdm(range(2), desc="a bar of another cell", file=screen))
    assert screen.getvalue().startswith("LATER\n\rA BAR OF ANOTHER CELL:")


def test_a_stream_whose_write_cannot_be_replaced_is_left_as_it_is(bars: InlineBars) -> None:
    class Fixed:
        __slots__ = ("text",)

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

    fixed = Fixed()
    with taking_bar_text(fixed, bars.note_text):
        list(tqdm(range(2), file=fixed))
    assert "2/2" in fixed.text
    assert bars.shown() == ()


def test_a_bar_made_before_goes_on_where_it_is(screen: Screen, opened: list[Any]) -> None:
    outer = tqdm(total=5, mininterval=0, miniters=1, desc="outer", file=screen)
    opened.append(outer)
    bars = InlineBars()
    with taking_bar_text(screen, bars.note_text):
        assert told(bars) == [], "it has not moved"
        outer.update(2)
        assert told(bars) == [("outer", "2", "5")]
        assert bars.shown()[0].is_elsewhere
    outer.update(1)
    assert "2/5" in screen.getvalue()
    assert "3/5" in screen.getvalue()


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_that_outlives_the_launch_is_drawn_unless_the_launch_has_failed(
    screen: Screen, bars: InlineBars, opened: list[Any], fails: bool
) -> None:
    with contextlib.suppress(ValueError), taking_bar_text(screen, bars.note_text):
        opened.append(tqdm(total=5, mininterval=0, miniters=1, file=screen))
        opened[0].update(2)
        if fails:
            raise ValueError
    assert screen.getvalue() == ""
    opened[0].update(1)
    assert ("3/5" in screen.getvalue()) is not fails


def test_an_interrupt_in_a_bar_leaves_no_lock_to_other_threads(
    screen: Screen, opened: list[Any]
) -> None:
    def interrupt(bar_text: str) -> None:
        raise KeyboardInterrupt

    # Not in its constructor: what that leaves of a bar is no matter of ours.
    opened.append(tqdm(total=5, file=io.StringIO(), mininterval=0, miniters=1))
    opened[0].fp = screen
    opened[0].sp = tqdm.status_printer(screen)
    with pytest.raises(KeyboardInterrupt), taking_bar_text(screen, interrupt):
        opened[0].update()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for lock in tqdm.get_lock().locks:  # type: ignore[attr-defined]
            assert pool.submit(_can_take, lock).result()


def _can_take(lock: Any) -> bool:
    is_taken = lock.acquire(True, 5)
    if is_taken:
        lock.release()
    return bool(is_taken)


def test_bars_drawn_elsewhere_give_their_numbers(bars: InlineBars, opened: list[Any]) -> None:
    other_screen = io.StringIO()

    def open_bar(**settings: Any) -> Any:
        opened.append(tqdm(file=other_screen, mininterval=0, miniters=1, **settings))
        return opened[-1]

    outer = open_bar(total=4, desc="epochs", bar_format="{n}")
    outer.update(1)
    inner = open_bar(total=10, unit_scale=True)
    inner.update(3)
    assert told(bars) == [("epochs", "1", "4"), ("", "3.00", "10.0")]
    assert all(bar.is_elsewhere for bar in bars.shown())
    # What a round takes is estimated of the rounds that are over, not of the one that is not.
    outer.start_t = outer.last_print_t - 3.7
    assert bars.shown()[0].elapsed_s == pytest.approx(3.7)
    inner.close()
    assert told(bars) == [("epochs", "1", "4"), ("", "3.00", "10.0")], "between two rounds"
    outer.close()
    assert told(bars) == []
    assert other_screen.getvalue()


@pytest.mark.parametrize("is_outer_text", [False, True])
def test_bars_of_both_kinds_are_in_the_order_in_which_they_began(
    screen: Screen, bars: InlineBars, opened: list[Any], is_outer_text: bool
) -> None:
    with taking_bar_text(screen, bars.note_text):
        for desc, is_text in (("outer", is_outer_text), ("inner", not is_outer_text)):
            stream = screen if is_text else io.StringIO()
            bar = tqdm(total=4, desc=desc, file=stream, mininterval=0, miniters=1)
            opened.append(bar)
            bar.update(1)
            time.sleep(0.001)
        assert told(bars) == [("outer", "1", "4"), ("inner", "1", "4")]
        assert [bar.is_elsewhere for bar in bars.shown()] == [not is_outer_text, is_outer_text]


def test_without_the_private_set_there_are_no_numbers_of_bars_elsewhere(
    bars: InlineBars, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.append(tqdm(total=4, file=io.StringIO(), mininterval=0, miniters=1))
    opened[0].update(1)
    assert told(bars) == [("", "1", "4")]
    monkeypatch.setitem(sys.modules, "tqdm.std", io)
    assert list(living_bars()) == []
    assert told(bars) == []


def test_a_bar_that_cannot_tell_has_no_numbers() -> None:
    assert numbers_of_bar(object()) is None
