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


def test_a_display_that_all_send_is_shown_once_at_its_place_among_the_lines(screen):
    for rank in (0, 1):
        screen.say(rank, "before\nsee: ")
        screen.show(rank, "figure")
        screen.say(rank, "after\n")
    assert screen.flush() == "[0-1] before\n[0-1] see: \nfigure\n[0-1] after\n"
    for rank in (0, 1):
        screen.show(rank, f"figure {rank}")
    assert screen.flush() == "[0]\nfigure 0\n[1]\nfigure 1\n"
    screen.say(0, "\r50%", "stderr")
    screen.flush()
    screen.show(0, "figure")
    assert screen.flush() == "[0]\nfigure\n"
    assert screen.err.endswith("[0] 50%"), "a bar stands below"


def test_after_a_stop_the_last_displays_are_shown_and_updates_are_kept(capfd):
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


def test_a_display_waits_for_its_twin_and_an_update_for_nobody(screen, monkeypatch):
    monkeypatch.setattr(console, "TICK_S", 0.0)
    monkeypatch.setattr(console, "HOLD_S", 1000.0)
    screen.show(0, "figure", handle="a")
    screen.console.tick()
    assert screen._capfd.readouterr().out == ""
    assert screen.console.due_in() is not None
    monkeypatch.setattr(console, "HOLD_S", 0.0)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0]\nfigure\n"
    assert screen.console.due_in() is None
    monkeypatch.setattr(console, "HOLD_S", 1000.0)
    for step in range(100):
        screen.show(0, f"step {step}", handle="a", update=True)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "step 99\n"


def test_with_a_template_every_display_has_its_prefix(capfd):
    screen = Show(capfd, prefix_template="<${rank}> ")
    for rank in (0, 1):
        screen.show(rank, "figure")
    assert screen.flush() == "<0>\nfigure\n<1>\nfigure\n"
    bare = Show(capfd, prefix_template="")
    bare.show(0, "figure")
    assert bare.flush() == "figure\n"


@pytest.mark.parametrize("handles", [("id0", "id1"), ("same", "same")])
def test_of_outputs_that_are_updated_the_lowest_rank_s_is_shown(screen, handles):
    for rank in (1, 0):
        screen.show(rank, f"start {rank}", handle=handles[rank])
    assert screen.flush() == "start 0\n"
    screen.show(1, "next 1", handle=handles[1], update=True)
    assert screen.flush() == ""
    screen.show(0, "next 0", handle=handles[0], update=True)
    assert screen.flush() == "next 0\n"


def test_the_cell_is_cleared_once_for_all_and_by_the_lowest_rank(screen, monkeypatch):
    waits: list[bool] = []
    monkeypatch.setattr(publish, "clear", lambda wait_for_new: waits.append(bool(wait_for_new)))
    for ranks, times in (((0, 1), 1), ((1,), 1), ((0,), 2)):
        for rank in ranks:
            screen.console.feed_display(rank, ClearOutput(wait=True))
        screen.flush()
        assert waits == [True] * times
