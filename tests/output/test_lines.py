from __future__ import annotations

import math
import random
import time

import pytest

from nbaccel.output.lines import LineAssembler

CHUNK = 1 << 16


def fed(lines: LineAssembler, data: bytes, size: int = CHUNK) -> list[str]:
    return [
        line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])[0]
    ]


@pytest.mark.parametrize("max_chars", [math.inf, 1_000_000])
def test_the_time_for_a_line_is_linear_in_its_length(max_chars: float) -> None:
    began = time.monotonic()
    lines = LineAssembler(max_chars)
    (line,) = fed(lines, b"x" * 40_000_000 + b"\n")
    assert time.monotonic() - began < 10.0
    assert len(line) == 40_000_000 if max_chars == math.inf else len(line) < 1_000_100


@pytest.mark.parametrize("start", [b"\r", b"y" * 1_000_000 + b"\r" * 100_000])
def test_the_time_is_linear_with_carriage_returns_in_the_line(start: bytes) -> None:
    began = time.monotonic()
    (line,) = fed(LineAssembler(), start + b"x" * 20_000_000 + b"\n")
    assert time.monotonic() - began < 10.0
    assert len(line) == 20_000_000


def test_of_a_line_that_is_too_long_head_and_tail_are_kept() -> None:
    text = "".join(f"{number:07d} " for number in range(500_000))  # 4 MB
    lines = LineAssembler(100_000)
    (line,) = fed(lines, text.encode() + b"\n")
    head, word, tail = line.partition(" … 3,900,000 characters not shown … ")
    assert word
    assert (head, tail) == (text[:50_000], text[-50_000:])
    assert fed(lines, b"next\n") == ["next"]


def test_a_line_of_the_greatest_length_is_whole() -> None:
    assert fed(LineAssembler(100_000), b"x" * 100_000 + b"\n") == ["x" * 100_000]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_rewrite_may_be_cut_anywhere(cut: int) -> None:
    data = b"\rprog 139\rprog 140 "
    lines = LineAssembler()
    lines.feed(data[:cut])
    lines.feed(data[cut:])
    assert lines.rewritten == "prog 140"
    assert lines.feed(b"\n")[0] == ["prog 140"]


def test_what_is_shorter_covers_what_was_there_only_as_far_as_it_goes() -> None:
    lines = LineAssembler()
    for piece in (b"\rabcdef", b"\rAB", b"\r", b"x"):
        lines.feed(piece)
    assert lines.rewritten == "xBcdef"
    assert lines.finish() == ["xBcdef"]
    assert lines.finish() == []


def test_pieces_make_the_same_lines_as_the_whole() -> None:
    dice = random.Random(2)
    text = "".join(dice.choice("ab\n\rü→") for _ in range(5_000)).encode()
    whole = fed(LineAssembler(), text)
    lines, found, at = LineAssembler(), [], 0
    while at < len(text):
        size = dice.randrange(1, 12)
        found += lines.feed(text[at : at + size])[0]
        at += size
    assert found == whole


def test_only_the_last_lines_are_made_where_no_more_are_wanted() -> None:
    lines = LineAssembler()
    lines.feed(b"unfinished")
    found = lines.feed(b" line\n1\n2\n3\n4\nunfinished", at_most=3)
    assert found == (["2", "3", "4"], 2)
    assert lines.feed(b" too\n", at_most=3) == (["unfinished too"], 0)


def test_a_line_that_is_erased_before_it_is_written_anew_has_no_rest_of_the_old() -> None:
    assert fed(LineAssembler(), b"\r\x1b[2Ka long line\r\x1b[2Kshort\n") == ["short"]
