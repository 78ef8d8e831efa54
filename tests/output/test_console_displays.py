"""Rich output among what workers print: its place, its folding, and what can be shown only once."""

from __future__ import annotations

import pytest

from nbaccel.output import console, publish
from nbaccel.workers.messaging import ClearOutput, Display
from tests.output.test_console import Screen


class Show(Screen):
    """A console without a notebook: of rich output, a terminal shows the text."""

    def show(self, rank: int, text: str, *, handle: str = "", update: bool = False) -> None:
        more = {"transient": {"display_id": handle}} if handle else {}
        content = {"data": {"text/plain": text, "text/html": f"<b>{text}</b>"}, "metadata": {}}
        if update:
            more["update"] = True  # type: ignore[assignment]
        self.console.feed_display(rank, Display(content | more))


@pytest.fixture
def screen(capfd: pytest.CaptureFixture[str]) -> Show:
    return Show(capfd)


def test_a_display_that_all_send_is_shown_once_and_without_a_label(screen: Show) -> None:
    for rank in (0, 1):
        screen.show(rank, "figure")
    assert screen.flush() == "figure\n"


def test_after_a_stop_the_last_displays_are_shown_and_updates_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    screen = Show(capfd, ranks=1, paced=True)
    screen.show(0, "the first", handle="a")
    for number in range(1000):
        screen.show(0, f"figure {number}")
    screen.console.end_is_near()
    shown = screen.flush().splitlines()
    assert shown[0] == "the first", "what is updated later depends on it"
    assert shown[-1] == "figure 999"
    assert 20 <= len(shown) <= 250
    assert f"{1001 - len(shown):,} lines not shown" in screen.err


def test_displays_that_differ_have_their_rank_above(screen: Show) -> None:
    for rank in (0, 1):
        screen.show(rank, f"figure {rank}")
    assert screen.flush() == "[0]\nfigure 0\n[1]\nfigure 1\n"


def test_a_display_keeps_its_place_among_the_lines(screen: Show) -> None:
    for rank in (0, 1):
        screen.say(rank, "before\n")
        screen.show(rank, "figure")
        screen.say(rank, "after\n")
    assert screen.flush() == "[0-1] before\nfigure\n[0-1] after\n"


def test_the_start_of_a_line_comes_before_the_display(screen: Show) -> None:
    for rank in (0, 1):
        screen.say(rank, "see: ")
        screen.show(rank, "figure")
        screen.say(rank, "end\n")
    assert screen.flush() == "[0-1] see: \nfigure\n[0-1] end\n"


def test_a_display_waits_for_its_twin_and_no_longer_than_that(
    screen: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "TICK_S", 0.0)
    monkeypatch.setattr(console, "HOLD_S", 1000.0)
    screen.show(0, "figure")
    screen.console.tick()
    assert screen._capfd.readouterr().out == ""
    assert screen.console.due_in() is not None
    monkeypatch.setattr(console, "HOLD_S", 0.0)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0]\nfigure\n"
    assert screen.console.due_in() is None


def test_a_bar_stands_below_a_display(screen: Show) -> None:
    screen.say(0, "\r50%", "stderr")
    screen.flush()
    screen.show(0, "figure")
    assert screen.flush() == "[0]\nfigure\n"
    assert screen.err.endswith("[0] 50%")


def test_with_a_template_every_display_has_its_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Show(capfd, prefix_template="<${rank}> ")
    for rank in (0, 1):
        screen.show(rank, "figure")
    assert screen.flush() == "<0>\nfigure\n<1>\nfigure\n"
    bare = Show(capfd, prefix_template="")
    bare.show(0, "figure")
    assert bare.flush() == "figure\n"


def test_of_outputs_that_are_updated_the_lowest_rank_s_is_shown(screen: Show) -> None:
    for rank in (1, 0):
        screen.show(rank, f"start {rank}", handle=f"id{rank}")
    assert screen.flush() == "start 0\n"
    for rank in (1, 0):
        screen.show(rank, f"next {rank}", handle=f"id{rank}", update=True)
    assert screen.flush() == "next 0\n"


def test_one_name_for_the_outputs_of_all_is_the_lowest_rank_s(screen: Show) -> None:
    screen.show(0, "start 0", handle="same")
    assert screen.flush() == "[0]\nstart 0\n"
    screen.show(1, "start 1", handle="same")
    screen.show(1, "next 1", handle="same", update=True)
    assert screen.flush() == ""
    screen.show(0, "next 0", handle="same", update=True)
    assert screen.flush() == "next 0\n"


def test_of_many_updates_only_the_last_is_shown(screen: Show) -> None:
    screen.show(0, "start", handle="a")
    screen.flush()
    for step in range(100):
        screen.show(0, f"step {step}", handle="a", update=True)
    assert screen.flush() == "step 99\n"


def test_an_update_waits_for_nobody(screen: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "TICK_S", 0.0)
    screen.show(0, "start", handle="a")
    screen.flush()
    monkeypatch.setattr(console, "HOLD_S", 1000.0)
    screen.show(0, "next", handle="a", update=True)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "next\n"


@pytest.fixture
def clears(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each time the cell is cleared: whether at once."""
    found: list[bool] = []
    monkeypatch.setattr(publish, "clear", lambda wait_for_new: found.append(not wait_for_new))
    return found


def test_the_cell_is_cleared_once_for_all_and_by_the_lowest_rank(
    screen: Show, clears: list[bool]
) -> None:
    for rank in (0, 1):
        screen.console.feed_display(rank, ClearOutput(wait=True))
    screen.flush()
    assert clears == [False]
    screen.console.feed_display(1, ClearOutput(wait=True))
    screen.flush()
    assert clears == [False], "rank 0 is the one that clears"
    screen.console.feed_display(0, ClearOutput(wait=True))
    screen.flush()
    assert clears == [False, False]
