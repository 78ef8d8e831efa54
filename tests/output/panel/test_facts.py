"""The facts by rank: histories that span a whole run, speeds by the worker's clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from nbaccel.base.training_metrics import MetricHistory, Metrics, ProgressBar
from nbaccel.output.panel.curves import mean_points
from nbaccel.output.panel.facts import (
    RankStatus,
    RunBoard,
    StepPace,
    loss_first,
    mean,
)
from nbaccel.output.panel.time_left import TimeLeft, most_left
from tests.output.panel.reports import report

GIB = 2**30


def metrics(time: float, steps: int, device_bytes: int | None = None, **values: float) -> Metrics:
    return report(time, steps, values, device_bytes=device_bytes)


def row(state: str = "running", **more: object) -> RankStatus:
    settled = {"rank": 0, "seconds": 0.0, "rss_bytes": GIB} | more
    return RankStatus(state=state, **settled)


# ------------------------------------------------------------------------- history


@given(st.integers(min_value=1, max_value=3000), st.integers(min_value=2, max_value=40))
def test_a_history_is_bounded_and_spans_the_run(count: int, most: int) -> None:
    history = MetricHistory(most)
    for i in range(count):
        history.add(float(i))
    values = history.values()
    assert len(values) <= 2 * most + 2
    assert (values[0], values[-1]) == (0.0, count - 1.0)
    assert values == sorted(values)
    if count <= most:
        assert values == list(range(count)), "three hundred points are three hundred"
    assert len(values) >= min(count, most), "and not more are left out than needed"


@given(st.integers(0, 9_999), st.sampled_from([100.0, -100.0, math.nan, math.inf]))
def test_a_spike_of_one_step_stays(place: int, spike: float) -> None:
    history = MetricHistory(50)
    for step in range(10_000):
        history.add(spike if step == place else math.sin(step), float(step))
    points = dict(history.points())
    assert points[place] == spike or math.isnan(points[place])
    assert len(points) < 160


def test_an_empty_history_has_nothing() -> None:
    history = MetricHistory()
    assert (history.first, history.last, history.values()) == (None, None, [])


# ------------------------------------------------------------------------- speed


def test_speed_is_of_the_last_seconds_and_of_all() -> None:
    pace = StepPace()
    for second in range(101):
        pace.add(second, min(second, 50) * 2 + max(0, second - 50) * 8)
    assert pace.recent(100.0) == pytest.approx(8.0)
    assert pace.overall == pytest.approx((50 * 2 + 50 * 8) / 100)


def test_one_moment_has_no_speed() -> None:
    pace = StepPace()
    assert (pace.overall, pace.recent(1.0)) == (None, None)
    pace.add(1.0, 5)
    assert (pace.overall, pace.recent(1.0)) == (None, None)


def test_a_loop_that_stands_still_has_no_speed_and_a_slow_one_has() -> None:
    quick, slow = StepPace(), StepPace()
    for i in range(10):
        quick.add(i * 0.25, i)
        slow.add(i * 20.0, i)
    assert quick.recent(60.0) == 0.0
    assert slow.recent(180.0 + 25.0) == pytest.approx(1 / 20)


def test_who_counts_anew_is_timed_anew() -> None:
    pace = StepPace()
    pace.add(0.0, 0)
    pace.add(10.0, 100)
    pace.add(20.0, 0)
    pace.add(21.0, 5)
    assert pace.overall == pytest.approx(5.0)


# ------------------------------------------------------------------------- what is heard


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["lr", "loss"], "loss"),
        (["lr", "eval_loss", "train_loss"], "eval_loss"),
        (["accuracy", "lr"], "accuracy"),
        (["Loss", "loss_scale"], "Loss"),
        ([], None),
    ],
)
def test_the_loss_is_what_is_called_so(names: list[str], chosen: str | None) -> None:
    assert [*loss_first(names), None][0] == chosen


def test_a_better_name_that_comes_later_begins_a_history_of_its_own() -> None:
    board = RunBoard([0], began_at=0.0)
    board.receive(0, metrics(1.0, 1, lr=0.1))
    board.receive(0, metrics(2.0, 2, lr=0.1, loss=5.0))
    board.receive(0, metrics(3.0, 3, lr=0.1, loss=4.0))
    facts = board.ranks[0]
    assert (facts.loss_name, facts.loss.values()) == ("loss", [5.0, 4.0])
    assert facts.metrics == {"lr": 0.1, "loss": 4.0}


def test_a_rank_that_is_not_shown_is_not_heard() -> None:
    board = RunBoard([0], began_at=0.0)
    board.receive(7, metrics(1.0, 1, loss=1.0))
    assert list(board.ranks) == [0]


def looping(time: float, batches: int, **more: object) -> Metrics:
    settled = {"steps": batches, "total_batches": 100, "epoch": 1, "samples": batches * 8} | more
    return report(time, batches=batches, **settled)


def test_what_is_left_is_that_of_the_slowest_rank() -> None:
    board = RunBoard([0, 1], began_at=0.0)
    assert most_left(board.ranks.values(), board.now) is None
    for rank, speed in ((0, 10), (1, 5)):
        for second in range(6):
            board.receive(rank, looping(second, speed * second))
    board.now = 5.0
    assert most_left(board.ranks.values(), board.now) == TimeLeft(
        seconds=pytest.approx((100 - 25) / 5), of_what="epoch"
    )
    assert board.samples_per_s == pytest.approx((10 + 5) * 8)


def test_what_is_left_of_bars_is_the_outer_one_s() -> None:
    board = RunBoard([0], began_at=0.0)
    outer = ProgressBar(description="a", fraction=0.5, left_s=60.0)
    inner = ProgressBar(description="b", fraction=0.5, left_s=2.0)
    board.receive(0, Metrics(time=0.0, steps=None, bars=(outer, inner)))
    assert most_left(board.ranks.values(), board.now) == TimeLeft(seconds=60.0, of_what="")
    board.now += 7.0
    assert most_left(board.ranks.values(), board.now) == TimeLeft(seconds=53.0, of_what=""), (
        "it is told again only when it moves"
    )


def test_each_loop_is_marked_where_it_began_and_no_more_of_them_than_are_readable() -> None:
    board = RunBoard([0], began_at=0.0)
    for epoch in range(1, 1001):
        board.receive(0, looping(float(epoch), 0, steps=(epoch - 1) * 50, epoch=epoch))
        board.receive(0, looping(epoch + 0.5, 50, steps=epoch * 50, epoch=epoch))
    marks = board.ranks[0].marks
    assert marks[:2] == [(0.0, "epoch 1"), (50.0, "epoch 2")]
    assert len(marks) <= 200


def test_every_point_that_is_reported_counts() -> None:
    board = RunBoard([0], began_at=0.0)
    board.receive(0, Metrics(time=1.0, steps=2, points=(("loss", ((1.0, 3.0), (2.0, 2.0))),)))
    board.receive(0, Metrics(time=2.0, steps=2))
    board.receive(0, Metrics(time=3.0, steps=3, points=(("loss", ((3.0, 1.0),)),)))
    assert board.ranks[0].loss.points() == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]


def test_what_was_only_seen_gives_way_to_what_is_logged() -> None:
    board = RunBoard([0], began_at=0.0)
    board.receive(0, Metrics(time=1.0, steps=1, points=(("loss", ((1.0, 3.0),)),)))
    logged = (("loss", ((10.0, 2.5),)),)
    board.receive(0, Metrics(time=2.0, steps=10, points=logged, replaced=("loss",)))
    assert board.ranks[0].loss.points() == [(10.0, 2.5)]


def test_all_metrics_have_a_history_and_the_loss_is_named_first() -> None:
    board = RunBoard([0, 1], began_at=0.0)
    board.receive(0, metrics(1.0, 1, lr=0.1, acc=0.5))
    board.receive(1, metrics(1.0, 1, lr=0.2, val_loss=3.0))
    assert board.metric_names() == ["val_loss", "lr", "acc"]
    assert board.ranks[1].histories["lr"].points() == [(1.0, 0.2)]


# ------------------------------------------------------------------------- the mean of ranks


def test_the_mean_of_ranks_that_report_together_is_theirs() -> None:
    points = [[(float(i), i * 2.0) for i in range(10)], [(float(i), 0.0) for i in range(10)]]
    assert mean_points(points) == [(float(i), float(i)) for i in range(10)]


def test_the_mean_is_bounded_spans_the_run_and_leaves_out_what_is_no_number() -> None:
    points = [[(float(i), math.nan if i % 3 else 5.0) for i in range(1000)]]
    found = mean_points(points, 20)
    assert len(found) == 20
    assert {value for _, value in found} == {5.0}
    assert found[0][0] < 60
    assert found[-1][0] > 940
    assert mean_points([]) == mean_points([[(1.0, math.inf)]]) == []
    # No more points than steps: a group of one rank alone would make the mean zigzag.
    ends_as_nan = [(float(i), float(i) if i < 5 else math.nan) for i in range(10)]
    assert mean_points([ends_as_nan, ends_as_nan]) == ends_as_nan[:5]
    assert mean_points([[(0.0, 1e308), (1.0, 1e308)]], 1)[0][1] == pytest.approx(1e308)


# ------------------------------------------------------------------------- what is seen


def test_peaks_stay_and_a_rank_that_has_gone_keeps_its_last_weight() -> None:
    board = RunBoard([0], began_at=0.0)
    for held in (1, 4, 2):
        board.see([row(rss_bytes=held * GIB, device_bytes=held * GIB)])
    board.see([row("done", rss_bytes=0, device_bytes=None)])
    facts = board.ranks[0]
    assert (facts.memory.rss, facts.memory.peak_rss) == (2 * GIB, 4 * GIB)
    assert (facts.memory.device, facts.memory.peak_device) == (2 * GIB, 4 * GIB)


def test_the_driver_knows_better_than_the_worker() -> None:
    board = RunBoard([0], began_at=0.0)
    board.receive(0, metrics(0.5, 1, device_bytes=GIB))
    assert board.ranks[0].memory.device == GIB
    board.see([row(device_bytes=3 * GIB)])
    board.receive(0, metrics(1.0, 2, device_bytes=GIB))
    assert board.ranks[0].memory.device == 3 * GIB


def test_a_state_is_as_old_as_when_it_was_first_seen() -> None:
    board = RunBoard([0], began_at=0.0)
    board.now = 3.0
    board.see([row("starting", seconds=3.0)])
    board.now = 5.0
    board.see([row("running", seconds=5.0)])
    board.now = 9.0
    board.see([row("running", seconds=9.0)])
    assert board.ranks[0].since == 5.0


def test_a_mean_shows_what_is_no_number() -> None:
    assert mean([1.0, 3.0]) == 2.0
    assert mean([]) is None
    assert math.isnan(mean([1.0, math.nan]) or 0.0)
    assert mean([1.0, -math.inf]) == -math.inf
