from __future__ import annotations

import random
import time
from typing import Any

import pytest

from nbaccel.output import console
from nbaccel.output.console import Console


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


@pytest.fixture
def screen(capfd: pytest.CaptureFixture[str]) -> Screen:
    return Screen(capfd)


def test_a_line_that_all_print_is_shown_once(screen: Screen) -> None:
    screen.say(0, "loading\nepoch 0\n")
    screen.say(1, "loading\nepoch 0\n")
    assert screen.end() == "[0-1] loading\n[0-1] epoch 0\n"


def test_lines_that_differ_keep_their_rank_and_their_order(screen: Screen) -> None:
    screen.say(0, "a\nsame\nb\n")
    screen.say(1, "c\nsame\nd\n")
    lines = screen.end().splitlines()
    assert sorted(lines) == ["[0-1] same", "[0] a", "[0] b", "[1] c", "[1] d"]
    for order in (["[0] a", "[0-1] same", "[0] b"], ["[1] c", "[0-1] same", "[1] d"]):
        assert [line for line in lines if line in order] == order


def test_a_line_waits_for_its_twin_and_no_longer_than_that(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "HOLD_S", 0.05)
    monkeypatch.setattr(console, "TICK_S", 0.0)
    screen.say(0, "only here\n")
    screen.console.tick()
    assert screen._capfd.readouterr().out == ""
    assert screen.console.due_in() is not None
    time.sleep(0.06)
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0] only here\n"
    assert screen.console.due_in() is None


def test_a_rank_that_has_ended_is_not_waited_for(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "TICK_S", 0.0)
    screen.console.close(1)
    screen.say(0, "alone\n")
    screen.console.tick()
    assert screen._capfd.readouterr().out == "[0] alone\n"


def test_ranks_are_named_in_spans(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(capfd, ranks=6)
    for rank in (0, 1, 2, 5):
        screen.say(rank, "x\n")
    assert screen.end() == "[0-2,5] x\n"


def test_the_same_text_on_two_streams_is_two_lines(screen: Screen) -> None:
    screen.say(0, "x\n", "stdout")
    screen.say(1, "x\n", "stderr")
    assert screen.end() == "[0] x\n"
    assert screen.err == "[1] x\n"


def test_which_stream_was_read_first_does_not_keep_lines_apart(screen: Screen) -> None:
    screen.say(0, "out\n")
    screen.say(0, "careful\nvery\n", "stderr")
    screen.say(1, "careful\nvery\n", "stderr")
    screen.say(1, "out\n")
    assert screen.end() == "[0-1] out\n"
    assert screen.err == "[0-1] careful\n[0-1] very\n"


def test_with_a_template_every_line_has_its_prefix_and_none_is_folded(
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_text_arrives_in_any_pieces(screen: Screen) -> None:
    text = "größer → 日本\nzweite\n".encode()
    for byte in text:
        screen.console.feed(0, "stdout", bytes([byte]))
    assert screen.end() == "[0] größer → 日本\n[0] zweite\n"


def test_a_last_line_without_its_end_is_shown(screen: Screen) -> None:
    screen.say(0, "unfinished")
    assert screen.flush() == ""
    assert screen.end() == "[0] unfinished\n"


def test_bytes_that_are_no_text_do_no_harm(screen: Screen) -> None:
    screen.console.feed(0, "stdout", b"\xff\xfe ok\n")
    screen.console.feed(1, "stdout", b"cut \xe2\x82")
    assert sorted(screen.end().splitlines()) == ["[0] \ufffd\ufffd ok", "[1] cut \ufffd"]


def test_an_empty_line_stays_a_line(screen: Screen) -> None:
    screen.say(0, "a\n\nb\n")
    assert screen.end() == "[0] a\n[0] \n[0] b\n"


def test_a_bar_is_drawn_in_place_and_kept_once(screen: Screen) -> None:
    for step in range(4):
        screen.say(0, f"\r{step}/3", "stderr")
    screen.flush()
    assert screen.err == "\r[0] 3/3"
    screen.say(0, "\r3/3 done\n", "stderr")
    screen.end()
    assert screen.err.endswith("[0] 3/3 done\n")
    assert screen.err.count("done") == 1


def test_a_shorter_state_of_a_bar_covers_a_longer_one(screen: Screen) -> None:
    screen.say(0, "\rlong long state", "stderr")
    screen.flush()
    screen.say(0, "\rshort          ", "stderr")
    screen.flush()
    assert screen.err.split("\r")[-1].rstrip() == "[0] short"
    assert screen.err.endswith(" " * len("long state")), "what stood there is wiped out"


def test_lines_printed_beside_a_bar_are_whole(screen: Screen) -> None:
    screen.say(0, "\r50%", "stderr")
    screen.flush()
    screen.say(1, "hello\n")
    out = screen.flush()
    assert out == "[1] hello\n"
    assert screen.err.startswith("\r")
    assert screen.err.endswith("[0] 50%")


def test_all_ranks_bars_are_one(screen: Screen) -> None:
    for rank in (0, 1):
        screen.say(rank, "\r10%", "stderr")
    screen.flush()
    assert "[0] 10%" in screen.err
    assert "[1]" not in screen.err


def test_output_is_written_at_most_ten_times_a_second(screen: Screen) -> None:
    for i in range(500):
        screen.say(0, f"{i}\n")
        screen.say(1, f"{i}\n")
        screen.console.tick()
    lines = screen.end().splitlines()
    assert lines == [f"[0-1] {i}" for i in range(500)]


def test_a_notice_comes_after_what_was_printed_before_it(screen: Screen) -> None:
    screen.say(0, "before\n", "stderr")
    screen.console.notice("nbaccel: look")
    screen.flush()
    assert screen.err == "[0] before\nnbaccel: look\n"


def test_the_last_lines_are_remembered_without_blank_ones(screen: Screen) -> None:
    screen.say(0, "".join(f"line {i}\n\n" for i in range(100)))
    assert screen.console.tails()[0][-2:] == ["line 98", "line 99"]
    assert screen.console.tails()[1] == []
    screen.end()


def test_nothing_is_lost_or_turned_around_in_a_storm(capfd: pytest.CaptureFixture[str]) -> None:
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


# ------------------------------------------------------------------------- too much of it


@pytest.fixture
def notebook(capfd: pytest.CaptureFixture[str]) -> Screen:
    """A console whose output goes to a browser."""
    return Screen(capfd, paced=True)


def block(first: int, number: int) -> str:
    return "".join(f"line {first + i}\n" for i in range(number))


def test_a_rank_that_prints_too_much_waits(notebook: Screen) -> None:
    number = 0
    while not notebook.console.is_full(0):
        notebook.say(0, block(number, 1000))
        number += 1000
        assert number < 1_000_000
    assert not notebook.console.is_full(1)
    assert notebook.end() == "".join(f"[0] line {i}\n" for i in range(number))
    assert not notebook.console.is_full(0)
    assert notebook.err == ""


def test_so_much_is_shown_at_once_and_no_more(
    notebook: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "HOLD_S", 0.0)
    monkeypatch.setattr(console, "TICK_S", 0.0)
    notebook.say(0, block(0, 20_000))
    notebook.console.tick()
    shown = notebook._capfd.readouterr().out
    assert 0 < len(shown) < 150_000
    assert notebook.console.due_in() is not None
    assert shown + notebook.end() == "".join(f"[0] line {i}\n" for i in range(20_000))


def test_after_a_stop_the_last_lines_are_shown_and_the_others_counted(notebook: Screen) -> None:
    notebook.say(0, block(0, 10_000))
    notebook.console.end_is_near()
    for _ in range(10):
        notebook.say(0, block(10_000, 10_000))
        assert not notebook.console.is_full(0)
    notebook.say(1, "few\n")
    shown = notebook.end().splitlines()
    own = [line for line in shown if line.startswith("[0] ")]
    assert own[-1] == "[0] line 19999"
    assert "[1] few" in shown
    assert 100 <= len(own) <= 1000
    assert f"{110_000 - len(own):,} lines of rank 0 not shown" in notebook.err


def test_after_a_stop_a_short_backlog_is_shown_whole(notebook: Screen) -> None:
    notebook.say(0, block(0, 100))
    notebook.console.end_is_near()
    notebook.say(0, "saved\n")
    assert len(notebook.end().splitlines()) == 101
    assert notebook.err == ""


@pytest.mark.slow
def test_a_storm_without_end_is_thinned_out(
    notebook: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "HOLD_S", 0.0)
    monkeypatch.setattr(console, "TICK_S", 0.0)
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


def test_a_line_as_long_as_a_book_does_not_go_to_the_browser(notebook: Screen) -> None:
    notebook.say(0, "x" * 5_000_000 + "the end\n")
    shown = notebook.end()
    assert len(shown) < 1_000_200
    assert shown.endswith("the end\n")
    assert "characters not shown" in shown


@pytest.mark.parametrize("ranks", [2, 8])
def test_different_lines_cost_little_whatever_the_number_of_ranks(
    capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    screen = Screen(capfd, ranks=ranks)
    number = 100_000 // ranks
    began = time.monotonic()
    for rank in range(ranks):
        screen.say(rank, "".join(f"rank {rank} line {i}\n" for i in range(number)))
    shown = screen.end()
    assert time.monotonic() - began < 20.0, "half a second on a quiet machine"
    assert len(shown.splitlines()) == number * ranks


def test_what_gloo_says_when_all_is_well_is_not_shown(screen: Screen) -> None:
    line = (
        "[Gloo] Rank {} is connected to {} peer ranks. "
        "Expected number of connected peer ranks is : 1"
    )
    for rank in screen.ranks:
        screen.say(rank, f"before\n{line.format(rank, 1)}\nafter\n")
    screen.say(1, line.format(1, 0) + "\n")  # somebody is missing: that is worth knowing
    assert screen.end() == f"[0-1] before\n[0-1] after\n[1] {line.format(1, 0)}\n"
    assert screen.console.tails()[0] == ["before", "after"]
