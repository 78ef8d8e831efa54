from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.output import console, publish
from nbaccel.output.console import Console, LineAssembler
from nbaccel.output.publish import CellPlace
from nbaccel.workers.messaging import ClearOutput, Display

CHUNK = 1 << 16


def fed(lines: LineAssembler, data: bytes, size: int = CHUNK) -> list[str]:
    return [
        line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])[0]
    ]


@pytest.mark.parametrize("max_chars", [math.inf, 1_000_000])
def test_the_time_for_a_line_is_linear_in_its_length(max_chars):
    began = time.monotonic()
    lines = LineAssembler(max_chars)
    (line,) = fed(lines, b"x" * 40_000_000 + b"\n")
    assert time.monotonic() - began < 10.0
    assert len(line) == 40_000_000 if max_chars == math.inf else len(line) < 1_000_100


def test_of_a_line_that_is_too_long_head_and_tail_are_kept():
    text = "".join(f"{number:07d} " for number in range(500_000))  # 4 MB
    lines = LineAssembler(100_000)
    (line,) = fed(lines, text.encode() + b"\n")
    head, word, tail = line.partition(" … 3,900,000 characters not shown … ")
    assert word
    assert (head, tail) == (text[:50_000], text[-50_000:])
    assert fed(lines, b"next\n") == ["next"]


def test_what_is_shorter_covers_what_was_there_only_as_far_as_it_goes():
    lines = LineAssembler()
    for piece in (b"\rabcdef", b"\rAB", b"\r", b"x"):
        lines.feed(piece)
    assert lines.rewritten == "xBcdef"
    assert lines.finish() == ["xBcdef"]
    assert lines.finish() == []
    assert fed(LineAssembler(), b"\r\x1b[2Ka long line\r\x1b[2Kshort\n") == ["short"]


def test_pieces_make_the_same_lines_as_the_whole():
    dice = random.Random(2)
    text = "".join(dice.choice("ab\n\rü→") for _ in range(5_000)).encode()
    whole = fed(LineAssembler(), text)
    lines, found, at = LineAssembler(), [], 0
    while at < len(text):
        size = dice.randrange(1, 12)
        found += lines.feed(text[at : at + size])[0]
        at += size
    assert found == whole


class Screen:
    """A console of two ranks, and what a terminal would show of it."""

    def __init__(self, capfd: pytest.CaptureFixture[str], ranks: int = 2, **settings: Any) -> None:
        self._capfd = capfd
        self.ranks = range(ranks)
        self.console = Console([*self.ranks], **settings)

    def say(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.console.feed(rank, stream, text.encode())

    def end(self) -> str:
        """Close everything; what came to stdout."""
        for rank in self.ranks:
            self.console.close(rank)
        return self.flush()

    def flush(self) -> str:
        self.console.tick(is_final=True)
        found = self._capfd.readouterr()
        self.err = found.err
        return found.out


def at_once(monkeypatch: pytest.MonkeyPatch, hold_s: float = 0.0) -> None:
    monkeypatch.setattr(console, "HOLD_S", hold_s)
    monkeypatch.setattr(console, "TICK_S", 0.0)


@pytest.fixture
def screen(capfd: pytest.CaptureFixture[str]) -> Screen:
    return Screen(capfd)


ON_STDERR = "stderr"
FOLDED: dict[str, tuple[list[tuple[Any, ...]], str, str]] = {
    "a line that all print is shown once": (
        [(0, "loading\nepoch 0\n"), (1, "loading\nepoch 0\n")],
        "[0-1] loading\n[0-1] epoch 0\n",
        "",
    ),
    "ranks are named in spans": ([(rank, "x\n") for rank in (0, 1, 2, 5)], "[0-2,5] x\n", ""),
    "the same text on two streams is two lines": (
        [(0, "x\n"), (1, "x\n", ON_STDERR)],
        "[0] x\n",
        "[1] x\n",
    ),
    "which stream was read first does not keep lines apart": (
        [(0, "out\n"), (0, "a\nb\n", ON_STDERR), (1, "a\nb\n", ON_STDERR), (1, "out\n")],
        "[0-1] out\n",
        "[0-1] a\n[0-1] b\n",
    ),
    "an empty line stays a line": ([(0, "a\n\nb\n")], "[0] a\n[0] \n[0] b\n", ""),
}


@pytest.mark.parametrize("what", FOLDED)
def test_what_ranks_print_is_folded(capfd, what):
    screen = Screen(capfd, ranks=6)
    said, out, err = FOLDED[what]
    for words in said:
        screen.say(*words)
    assert (screen.end(), screen.err) == (out, err)


def test_a_line_waits_for_its_twin_and_no_longer_than_that(screen, monkeypatch):
    at_once(monkeypatch, hold_s=0.05)
    screen.say(0, "only here\n")
    screen.console.tick()
    assert screen._capfd.readouterr().out == ""
    assert screen.console.due_in() is not None
    time.sleep(0.06)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0] only here\n"
    assert screen.console.due_in() is None
    screen.console.close(1)
    at_once(monkeypatch, hold_s=100.0)
    screen.say(0, "alone\n")
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0] alone\n", "who has ended is not waited for"


def test_with_a_template_every_line_has_its_prefix_and_none_is_folded(capfd):
    screen = Screen(capfd, prefix_template="${role_name}${rank}/${local_rank} ${unknown}: ")
    screen.say(0, "x\ny\n")
    screen.say(1, "x\n")
    lines = screen.end().splitlines()
    assert sorted(lines) == [
        "worker0/0 ${unknown}: x",
        "worker0/0 ${unknown}: y",
        "worker1/1 ${unknown}: x",
    ]
    assert screen.console.due_in() is None


def test_a_bar_of_all_is_drawn_in_place_below_whole_lines_and_kept_once(screen):
    for step in range(4):
        for rank in (0, 1):
            screen.say(rank, f"\r{step}/3", "stderr")
    screen.flush()
    assert screen.err == "\r[0] 3/3"
    screen.say(1, "hello\n")
    assert screen.flush() == "[1] hello\n"
    assert screen.err.startswith("\r")
    assert screen.err.endswith("[0] 3/3")
    for rank in (0, 1):
        screen.say(rank, "\r3/3 done\n", "stderr")
    screen.end()
    assert screen.err.endswith("[0-1] 3/3 done\n")
    assert screen.err.count("done") == 1


def test_last_lines_notices_and_bytes_that_are_no_text(screen):
    screen.say(0, "before\n", "stderr")
    screen.console.notice("nbaccel: look")
    screen.say(0, "".join(f"line {i}\n\n" for i in range(100)))
    screen.flush()
    assert screen.err == "[0] before\nnbaccel: look\n"
    assert screen.console.tails()[0][-2:] == ["line 98", "line 99"]
    assert screen.console.tails()[1] == []
    screen.console.feed(0, "stdout", b"\xff\xfe ok\nunfinished")
    screen.console.feed(1, "stdout", b"cut \xe2\x82")
    assert screen.flush() == "[0] \ufffd\ufffd ok\n"
    assert sorted(screen.end().splitlines()) == ["[0] unfinished", "[1] cut \ufffd"]


def test_nothing_is_lost_or_turned_around_in_a_storm(capfd):
    screen = Screen(capfd, ranks=3)
    dice = random.Random(1)  # the same storm every time
    said: dict[int, list[str]] = {0: [], 1: [], 2: []}
    shown = ""
    for number in range(600):
        rank = dice.randrange(3)
        text = f"common {number // 20}" if dice.random() < 0.4 else f"own {rank} {number}"
        said[rank].append(text)
        screen.say(rank, text + "\n")
        if dice.random() < 0.05:
            shown += screen.flush()
    shown += screen.end()
    for rank, expected in said.items():
        found = [text for ranks, text in map(parse, shown.splitlines()) if rank in ranks]
        assert found == expected


def parse(line: str) -> tuple[set[int], str]:
    """`[0-1,3] text` → the ranks, and the text."""
    prefix, _, text = line.removeprefix("[").partition("] ")
    ranks: set[int] = set()
    for span in prefix.split(","):
        first, _, last = span.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks, text


@pytest.fixture
def notebook(capfd: pytest.CaptureFixture[str]) -> Screen:
    """A console whose output goes to a browser."""
    return Screen(capfd, paced=True)


def block(first: int, number: int) -> str:
    return "".join(f"line {first + i}\n" for i in range(number))


def test_a_rank_that_prints_too_much_waits_and_so_much_is_shown_at_once(notebook, monkeypatch):
    number = 0
    while not notebook.console.is_full(0):
        notebook.say(0, block(number, 1000))
        number += 1000
        assert number < 1_000_000
    assert not notebook.console.is_full(1)
    assert notebook.end() == "".join(f"[0] line {i}\n" for i in range(number))
    assert not notebook.console.is_full(0)
    assert notebook.err == ""

    at_once(monkeypatch)
    notebook = Screen(notebook._capfd, paced=True)
    notebook.say(0, block(0, 20_000))
    notebook.console.tick()
    shown = notebook._capfd.readouterr().out
    assert 0 < len(shown) < 150_000
    assert notebook.console.due_in() is not None
    assert shown + notebook.end() == "".join(f"[0] line {i}\n" for i in range(20_000))


@pytest.mark.parametrize("blocks", [0, 10])
def test_after_a_stop_the_last_lines_are_shown_and_the_others_counted(notebook, blocks):
    number = 10_000 if blocks else 100  # a short backlog is shown whole
    notebook.say(0, block(0, number))
    notebook.console.end_is_near()
    for _ in range(blocks):
        notebook.say(0, block(number, number))
        assert not notebook.console.is_full(0)
    notebook.say(1, "few\n")
    shown = notebook.end().splitlines()
    assert "[1] few" in shown
    own = [line for line in shown if line.startswith("[0] ")]
    if blocks:
        assert own[-1] == "[0] line 19999"
        assert 100 <= len(own) <= 1000
        assert f"{110_000 - len(own):,} lines of rank 0 not shown" in notebook.err
    else:
        assert len(own) == number
        assert notebook.err == ""


@pytest.mark.slow
def test_a_storm_without_end_is_thinned_out(notebook, monkeypatch):
    at_once(monkeypatch)
    clock = [time.monotonic()]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    out, err, said = "", "", 0
    for _ in range(600):  # a minute
        clock[0] += 0.1
        for rank in (0, 1):
            for _ in range(4):
                if not notebook.console.is_full(rank):
                    notebook.say(rank, block(said, 200).replace(" ", " " * 200))
                    said += 200
        notebook.console.tick()
        found = notebook._capfd.readouterr()
        out, err = out + found.out, err + found.err
    assert len(out) < 16_000_000, "10 MB, and 100 kB a second"
    assert err.count("more than 10 MB have been printed") == 1
    assert 30 < err.count("not shown") <= 61
    rest = notebook.end()
    assert f" {said - 1}\n" in rest


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
def test_empty_lines_that_are_printed_stay(panelled, cell, piece):
    text = "\n\na\n\n\nb\n\nc\n"
    for start in range(0, len(text), piece):
        panelled.say(0, text[start : start + piece], "stdout")
    panelled.end()
    assert cell.streams("stdout") == "".join(f"[0] {line}\n" for line in text.split("\n")[:-1])


def test_lines_drawn_in_place_are_told_of_each_rank_and_stay_as_lines(panelled, cell):
    panelled.say(0, "\r40 of 50")
    panelled.say(1, "\rhalf of 3", "stdout")
    assert panelled.console.rewritten_lines() == {0: ("40 of 50",), 1: ("half of 3",)}
    assert cell.events == []
    panelled.say(1, "\rhalf of 4\n", "stdout")
    panelled.end()
    assert cell.streams("stdout") == "[1] half of 4\n"
    assert cell.streams("stderr") == "[0] 40 of 50\n"


def test_notices_of_a_worker_are_no_errors(panelled, cell):
    panelled.say(0, "nbaccel: look\nTraceback\n")
    panelled.console.notice("nbaccel: and here")
    panelled.end()
    assert cell.streams("stdout") == "[0] nbaccel: look\nnbaccel: and here\n"
    assert cell.streams("stderr") == "[0] Traceback\n"


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_place_comes_before_everything_unless_the_call_is_over_before(panelled, cell, is_quick):
    if is_quick:
        panelled.console.feed(0, "stdout", b"quick\n")
        panelled.end()
        assert cell.events == ["stdout:[0] quick\n"]
        return
    panelled.console.feed_display(0, Display({"data": {"text/plain": "figure"}, "metadata": {}}))
    panelled.console.tick()
    panelled.say(0, "line\n", "stdout")
    panelled.place.show({"text/plain": "the panel"})
    panelled.end()
    assert cell.events == ["display", "stdout:[0]\n", "display figure", "stdout:[0] line\n"]
    assert cell.updates == 1, "the panel replaces what is there"


def test_after_a_clear_the_panel_is_at_the_top_again(panelled, cell):
    panelled.say(0, "old\n", "stdout")
    panelled.place.show({"text/plain": "panel"})
    panelled.console.feed_display(0, ClearOutput(wait=True))
    panelled.console.tick()
    panelled.say(0, "new\n", "stdout")
    panelled.end()
    assert cell.events[cell.events.index("clear") + 1 :] == ["display panel", "stdout:[0] new\n"]


def test_without_a_dashboard_bars_are_drawn_as_no_errors(cell, monkeypatch):
    monkeypatch.setenv("NBACCEL_DASHBOARD", "0")
    one = Panelled(cell, monkeypatch)
    one.say(0, "\r 40%|████      | 2/5 [00:01<00:01,  1.9it/s]")
    one.say(0, "\r100%|██████████| 5/5 [00:01<00:00,  1.9it/s]\n")
    one.end()
    assert cell.streams("stderr") == ""
    assert "100%|" in cell.streams("stdout")
    assert not any(event.startswith("display") for event in cell.events)
