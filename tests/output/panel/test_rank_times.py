from __future__ import annotations

import random

import pytest

from nbaccel.base.spent_time import SpentTime
from nbaccel.output.panel.facts import TimeComparison


def test_the_parts_add_up_to_the_total():
    comparison = TimeComparison(range(3))
    generator = random.Random(0)
    spent = [[0.0, 0.0] for _ in range(3)]
    for second in range(1, 100):
        for rank in range(3):
            spent[rank][0] += generator.random() / 2
            spent[rank][1] += generator.random() / 2
            comparison.receive(rank, 50 + second + rank / 10, SpentTime(second + 0.0, *spent[rank]))
    for times in comparison.by_rank().values():
        parts = times.computing_s + times.communicating_s + times.data_s + times.waiting_s
        assert parts == pytest.approx(times.total_s)
        assert min(times.communicating_s, times.waiting_s) >= 0


def test_who_waits_least_in_collectives_holds_the_others_up():
    comparison = TimeComparison(range(3))
    for second in range(1, 21):
        for rank, share in enumerate((0.5, 0.1, 0.4)):
            spent = SpentTime(second + 0.0, 0.0, share * second)
            comparison.receive(rank, 100 + second + 0.03 * rank, spent)
    slowest = comparison.slowest()
    assert slowest is not None
    assert slowest.rank == 1
    assert slowest.waited_s == pytest.approx((0.4 + 0.3) / 2 * 20, rel=0.02)
    assert slowest.waited_share == pytest.approx(0.35, rel=0.02)
    times = comparison.by_rank()
    assert times[0].waiting_s == pytest.approx(8.0, rel=0.02)
    assert times[0].communicating_s == pytest.approx(2.0, rel=0.08)
    assert times[1].waiting_s == pytest.approx(0.0, abs=0.1)


def test_ranks_that_are_late_in_turn_both_wait_and_none_stands_out():
    comparison = TimeComparison(range(2))
    seconds = [0.0, 0.0]
    for step in range(1, 320):
        time_s = step / 4
        waiting_rank = int(time_s // 20) % 2
        seconds[waiting_rank] += 0.1
        for rank in range(2):
            comparison.receive(rank, 10 + time_s, SpentTime(time_s, 0.0, seconds[rank]))
    # The totals are equal, and yet each has waited.
    assert seconds[0] == pytest.approx(seconds[1], rel=0.3)
    assert all(times.waiting_s > 10 for times in comparison.by_rank().values())
    assert comparison.slowest() is None


def test_a_rank_that_reports_at_its_end_alone_or_at_other_moments_is_compared_fairly():
    comparison = TimeComparison(range(2))
    for step in range(1, 4001):
        comparison.receive(0, step / 4, SpentTime(step / 4, 0.0, step / 8))
    assert comparison.slowest() is None, "nothing is known of the other"
    comparison.receive(1, 1000.0, SpentTime(1000.0, 0.0, 50.0))
    slowest = comparison.slowest()
    assert slowest is not None
    assert (slowest.rank, slowest.waited_s) == (1, pytest.approx(450.0))
    held = sum(len(samples) for samples in comparison._samples.values())
    assert held < 600

    comparison = TimeComparison(range(2))
    for step in range(1, 200):
        for rank, delay in enumerate((0.0, 0.2)):
            time_s = step / 4 + delay
            # Both are in a collective for the same half of each second.
            in_collective = int(time_s) * 0.5 + min(time_s % 1, 0.5)
            comparison.receive(rank, 5 + time_s, SpentTime(time_s, 0.0, in_collective))
    for times in comparison.by_rank().values():
        assert times.waiting_s < 0.12 * times.total_s
    assert comparison.slowest() is None


def test_a_rank_alone_waits_for_nobody_and_little_waiting_is_not_worth_a_word():
    comparison = TimeComparison([0])
    comparison.receive(0, 10.0, SpentTime(10.0, 2.0, 3.0))
    (times,) = comparison.by_rank().values()
    assert (times.waiting_s, times.communicating_s, times.data_s) == (0.0, 3.0, 2.0)
    assert comparison.slowest() is None
    comparison = TimeComparison(range(2))
    comparison.receive(0, 10.0, SpentTime(10.0, 0.0, 1.1))
    comparison.receive(1, 10.0, SpentTime(10.0, 0.0, 1.0))
    assert comparison.slowest() is None
