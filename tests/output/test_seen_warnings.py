from __future__ import annotations

import time

import pytest

from nbaccel.output.seen_warnings import SeenWarnings


@pytest.mark.parametrize(
    "line",
    [
        "/a/b.py:12: UserWarning: it is late",
        "UserWarning: it is late",
        "[W1125 reducer.cpp:1] UserWarning: it is late",
        "<ipython-input-3>:1: UserWarning: it is late",
    ],
)
def test_a_warning_is_found_wherever_it_stands(line: str) -> None:
    seen = SeenWarnings()
    seen.count(1, ["before", line, "  warnings.warn('it is late')"])
    assert list(seen.by_text) == ["UserWarning: it is late"]


def test_equal_ones_are_counted_with_their_ranks() -> None:
    seen = SeenWarnings()
    for rank in (1, 0, 1):
        seen.count(rank, ["x.py:1: FutureWarning: old"])
    assert seen.by_text["FutureWarning: old"].count == 3
    assert seen.by_text["FutureWarning: old"].ranks == {0, 1}


@pytest.mark.parametrize("line", ["Warning: x", "my_warning: 3", "UserWarning:", "no Warnings: 0"])
def test_other_lines_are_none(line: str) -> None:
    seen = SeenWarnings()
    seen.count(0, [line])
    assert not seen.by_text


def test_it_is_bounded() -> None:
    seen = SeenWarnings()
    seen.count(0, [f"UserWarning: number {number} {'x' * 10_000}" for number in range(1000)])
    assert len(seen.by_text) == 50
    assert seen.num_left_out == 950
    assert sum(map(len, seen.by_text)) < 50 * 500


def test_many_lines_take_little_time() -> None:
    seen = SeenWarnings()
    began = time.perf_counter()
    seen.count(0, ["epoch 3, loss 0.27, all is well"] * 1_000_000)
    assert time.perf_counter() - began < 2.0
