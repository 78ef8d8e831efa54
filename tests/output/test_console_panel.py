"""A console whose call has a panel: its place comes first, bars are no lines, nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.output import console, publish
from nbaccel.output.console import Console
from nbaccel.output.publish import CellPlace
from nbaccel.workers.messaging import ClearOutput, Display


class NotebookCell:
    """A cell's output, in the order in which a front end would show it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.updates = 0
        monkeypatch.setattr(publish, "has_cells", lambda: True)
        monkeypatch.setattr(publish, "publish_display", self._display)
        monkeypatch.setattr(publish, "clear", lambda wait_for_new: self.events.append("clear"))
        # Not in `sys` itself: pytest puts its own streams back after the fixtures.
        streams = {name: _Stream(name, self.events) for name in ("stdout", "stderr")}
        monkeypatch.setattr(console, "sys", SimpleNamespace(**streams))

    def _display(self, content: Mapping[str, Any]) -> None:
        if content.get("update"):
            self.updates += 1
        else:
            self.events.append(f"display {content['data'].get('text/plain', '')}".strip())

    def streams(self, name: str) -> str:
        return "".join(
            event.removeprefix(f"{name}:") for event in self.events if event.startswith(f"{name}:")
        )


class _Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def write(self, text: str) -> None:
        self._events.append(f"{self._name}:{text}")

    def flush(self) -> None:
        pass


class Panelled:
    """A console of two ranks with a place."""

    def __init__(self, cell: NotebookCell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(console, "HOLD_S", 0.0)
        monkeypatch.setattr(console, "TICK_S", 0.0)
        monkeypatch.setattr(console, "_FIRST_TICK_S", 0.0)
        self.cell, self.place = cell, CellPlace()
        self.console = Console([0, 1], place=self.place)

    def say(self, rank: int, text: str, stream: str = "stderr") -> None:
        self.console.feed(rank, stream, text.encode())
        self.console.tick()

    def end(self) -> None:
        for rank in (0, 1):
            self.console.close(rank)
        self.console.show_last()


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> NotebookCell:
    return NotebookCell(monkeypatch)


@pytest.fixture
def panelled(cell: NotebookCell, monkeypatch: pytest.MonkeyPatch) -> Panelled:
    return Panelled(cell, monkeypatch)


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_empty_lines_that_are_printed_stay(
    panelled: Panelled, cell: NotebookCell, piece: int
) -> None:
    text = "\n\na\n\n\nb\n\nc\n"
    for start in range(0, len(text), piece):
        panelled.say(0, text[start : start + piece], "stdout")
    panelled.end()
    assert cell.streams("stdout") == "".join(f"[0] {line}\n" for line in text.split("\n")[:-1])


def test_lines_drawn_in_place_are_told_of_each_rank_and_stay_as_lines(
    panelled: Panelled, cell: NotebookCell
) -> None:
    panelled.say(0, "\r40 of 50")
    panelled.say(1, "\rhalf of 3", "stdout")
    assert panelled.console.rewritten_lines() == {0: ("40 of 50",), 1: ("half of 3",)}
    assert cell.events == []
    panelled.say(1, "\rhalf of 4\n", "stdout")
    panelled.end()
    assert cell.streams("stdout") == "[1] half of 4\n"
    assert cell.streams("stderr") == "[0] 40 of 50\n"


def test_notices_of_a_worker_are_no_errors(panelled: Panelled, cell: NotebookCell) -> None:
    panelled.say(0, "nbaccel: look\nTraceback\n")
    panelled.console.notice("nbaccel: and here")
    panelled.end()
    assert cell.streams("stdout") == "[0] nbaccel: look\nnbaccel: and here\n"
    assert cell.streams("stderr") == "[0] Traceback\n"


def test_the_place_comes_before_everything(panelled: Panelled, cell: NotebookCell) -> None:
    panelled.console.feed_display(0, Display({"data": {"text/plain": "figure"}, "metadata": {}}))
    panelled.console.tick()
    panelled.say(0, "line\n", "stdout")
    panelled.place.show({"text/plain": "the panel"})
    panelled.end()
    assert cell.events == ["display", "stdout:[0]\n", "display figure", "stdout:[0] line\n"]
    assert cell.updates == 1, "the panel replaces what is there"


def test_a_call_that_is_over_before_it_has_shown_anything_has_no_place(
    panelled: Panelled, cell: NotebookCell
) -> None:
    panelled.console.feed(0, "stdout", b"quick\n")
    panelled.end()
    assert cell.events == ["stdout:[0] quick\n"]


def test_after_a_clear_the_panel_is_at_the_top_again(
    panelled: Panelled, cell: NotebookCell
) -> None:
    panelled.say(0, "old\n", "stdout")
    panelled.place.show({"text/plain": "panel"})
    panelled.console.feed_display(0, ClearOutput(wait=True))
    panelled.console.tick()
    panelled.say(0, "new\n", "stdout")
    panelled.end()
    assert cell.events[cell.events.index("clear") + 1 :] == ["display panel", "stdout:[0] new\n"]


def test_ten_thousand_lines_are_all_there(panelled: Panelled, cell: NotebookCell) -> None:
    dice = random.Random(3)  # the same every time
    said: dict[int, list[str]] = {0: [], 1: []}
    for number in range(10_000):
        rank = dice.randrange(2)
        said[rank].append(f"{number}")
        panelled.console.feed(rank, "stdout", f"{number}\n".encode())
        if dice.random() < 0.01:
            panelled.console.tick()
    panelled.end()
    shown = cell.streams("stdout").splitlines()
    for rank in (0, 1):
        assert [x.removeprefix(f"[{rank}] ") for x in shown if x[1] == str(rank)] == said[rank]


def test_without_a_dashboard_bars_are_drawn_as_no_errors(
    cell: NotebookCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBACCEL_DASHBOARD", "0")
    one = Panelled(cell, monkeypatch)
    one.say(0, "\r 40%|████      | 2/5 [00:01<00:01,  1.9it/s]")
    one.say(0, "\r100%|██████████| 5/5 [00:01<00:00,  1.9it/s]\n")
    one.end()
    assert cell.streams("stderr") == ""
    assert "100%|" in cell.streams("stdout")
    assert not any(event.startswith("display") for event in cell.events)
