"""The facts by rank: histories that span a whole run, speeds by the worker's clock."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from nbaccel.base.training_metrics import MetricHistory, Metrics, OuterLoop, ProgressBar
from nbaccel.loops.metrics_reporter import ProgressBars, TrainingLoops
from nbaccel.output.panel import live_html
from nbaccel.output.panel.curves import mean_points
from nbaccel.output.panel.facts import (
    RankStatus,
    RunBoard,
    StepPace,
    TimeLeft,
    loss_first,
    most_left,
)
from tests.output.panel.finished import final_html, final_line, report

GIB = 2**30


def metrics(time: float, steps: int, device_bytes: int | None = None, **values: float) -> Metrics:
    return report(time, steps, values, device_bytes=device_bytes)


def row(state: str = "running", **more: object) -> RankStatus:
    settled = {"rank": 0, "seconds": 0.0, "rss_bytes": GIB} | more
    return RankStatus(state=state, **settled)


@given(st.integers(min_value=1, max_value=3000), st.integers(min_value=2, max_value=40))
def test_a_history_is_bounded_and_spans_the_run(count, most):
    history = MetricHistory(most)
    for i in range(count):
        history.add(float(i), i)
    values = [value for _, value in history.points()]
    assert len(values) <= 2 * most + 2
    assert (values[0], values[-1]) == (0.0, count - 1.0)
    assert values == sorted(values)
    if count <= most:
        assert values == list(range(count)), "three hundred points are three hundred"
    assert len(values) >= min(count, most), "and not more are left out than needed"


@given(st.integers(0, 9_999), st.sampled_from([100.0, -100.0, math.nan, math.inf]))
def test_a_spike_of_one_step_stays(place, spike):
    history = MetricHistory(50)
    for step in range(10_000):
        history.add(spike if step == place else math.sin(step), float(step))
    points = dict(history.points())
    assert points[place] == spike or math.isnan(points[place])
    assert len(points) < 160


def test_speed_is_of_the_last_seconds_and_of_all():
    pace, quick, slow, anew = StepPace(), StepPace(), StepPace(), StepPace()
    for second in range(101):
        pace.add(second, min(second, 50) * 2 + max(0, second - 50) * 8)
    assert pace.recent(100.0) == pytest.approx(8.0)
    assert pace.overall == pytest.approx((50 * 2 + 50 * 8) / 100)
    for i in range(10):
        quick.add(i * 0.25, i)
        slow.add(i * 20.0, i)
    assert quick.recent(60.0) == 0.0, "it stands still"
    assert slow.recent(180.0 + 25.0) == pytest.approx(1 / 20)
    for seconds, count in ((0.0, 0), (10.0, 100), (20.0, 0), (21.0, 5)):
        anew.add(seconds, count)
    assert anew.overall == pytest.approx(5.0), "who counts anew is timed anew"


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
def test_the_loss_is_what_is_called_so(names, chosen):
    assert [*loss_first(names), None][0] == chosen


def test_all_metrics_have_histories_of_every_point_and_the_loss_is_named_first():
    board = RunBoard([0, 1], began_at=0.0)
    board.receive(0, metrics(1.0, 1, lr=0.1, acc=0.5))
    board.receive(1, metrics(1.0, 1, lr=0.2, val_loss=3.0))
    assert board.metric_names() == ["val_loss", "lr", "acc"]
    assert board.ranks[1].histories["lr"].points() == [(1.0, 0.2)]
    board = RunBoard([0], began_at=0.0)
    board.receive(0, metrics(1.0, 1, lr=0.1))
    board.receive(0, metrics(2.0, 2, lr=0.1, loss=5.0))
    board.receive(0, metrics(3.0, 3, lr=0.1, loss=4.0))
    facts = board.ranks[0]
    assert (facts.loss_name, facts.loss.points()) == ("loss", [(2, 5.0), (3, 4.0)]), "a better name"
    assert facts.metrics == {"lr": 0.1, "loss": 4.0}
    board = RunBoard([0], began_at=0.0)
    board.receive(0, Metrics(time=1.0, steps=2, points=(("loss", ((1.0, 3.0), (2.0, 2.0))),)))
    board.receive(0, Metrics(time=2.0, steps=2))
    board.receive(0, Metrics(time=3.0, steps=3, points=(("loss", ((3.0, 1.0),)),)))
    assert board.ranks[0].loss.points() == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]
    # What was only seen gives way to what is logged.
    logged = (("loss", ((10.0, 2.5),)),)
    board.receive(0, Metrics(time=4.0, steps=10, points=logged, replaced=("loss",)))
    assert board.ranks[0].loss.points() == [(10.0, 2.5)]


def looping(time: float, batches: int, **more: object) -> Metrics:
    settled = {"steps": batches, "total_batches": 100, "epoch": 1, "samples": batches * 8} | more
    return report(time, batches=batches, **settled)


def test_what_is_left_is_that_of_the_slowest_rank_and_of_the_outer_bar():
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

    board = RunBoard([0], began_at=0.0)
    outer = ProgressBar(description="a", fraction=0.5, left_s=60.0)
    inner = ProgressBar(description="b", fraction=0.5, left_s=2.0)
    board.receive(0, Metrics(time=0.0, steps=None, bars=(outer, inner)))
    assert most_left(board.ranks.values(), board.now) == TimeLeft(seconds=60.0, of_what="")
    board.now += 7.0
    assert most_left(board.ranks.values(), board.now) == TimeLeft(seconds=53.0, of_what=""), (
        "it is told again only when it moves"
    )


def test_each_loop_is_marked_where_it_began_and_no_more_of_them_than_are_readable():
    board = RunBoard([0], began_at=0.0)
    for epoch in range(1, 1001):
        board.receive(0, looping(float(epoch), 0, steps=(epoch - 1) * 50, epoch=epoch))
        board.receive(0, looping(epoch + 0.5, 50, steps=epoch * 50, epoch=epoch))
    marks = board.ranks[0].marks
    assert marks[:2] == [(0.0, "epoch 1"), (50.0, "epoch 2")]
    assert len(marks) <= 200


def test_the_mean_is_bounded_spans_the_run_and_leaves_out_what_is_no_number():
    points = [[(float(i), i * 2.0) for i in range(10)], [(float(i), 0.0) for i in range(10)]]
    assert mean_points(points) == [(float(i), float(i)) for i in range(10)]
    points = [[(float(i), math.nan if i % 3 else 5.0) for i in range(1000)]]
    found = mean_points(points)
    assert len(found) == 120
    assert {value for _, value in found} == {5.0}
    assert found[0][0] < 10
    assert found[-1][0] > 990
    assert mean_points([]) == mean_points([[(1.0, math.inf)]]) == []
    # No more points than steps: a group of one rank alone would make the mean zigzag.
    ends_as_nan = [(float(i), float(i) if i < 5 else math.nan) for i in range(10)]
    assert mean_points([ends_as_nan, ends_as_nan]) == ends_as_nan[:5]
    assert mean_points([[(0.0, 1e308)], [(0.0, 1e308)]])[0][1] == pytest.approx(1e308)


def test_peaks_and_the_last_weight_stay_and_a_state_is_as_old_as_it_was_seen():
    board = RunBoard([0], began_at=0.0)
    for held in (1, 4, 2):
        board.see([row(rss_bytes=held * GIB, device_bytes=held * GIB)])
    board.see([row("done", rss_bytes=0, device_bytes=None)])
    facts = board.ranks[0]
    assert (facts.memory.rss, facts.memory.peak_rss) == (2 * GIB, 4 * GIB)
    assert (facts.memory.device, facts.memory.peak_device) == (2 * GIB, 4 * GIB)
    board = RunBoard([0], began_at=0.0)
    board.receive(0, metrics(0.5, 1, device_bytes=GIB))
    assert board.ranks[0].memory.device == GIB
    for state, now in (("starting", 3.0), ("running", 5.0), ("running", 9.0)):
        board.now = now
        board.see([row(state, seconds=now, device_bytes=3 * GIB)])
    assert board.ranks[0].since == 5.0
    board.receive(0, metrics(1.0, 2, device_bytes=GIB))
    assert board.ranks[0].memory.device == 3 * GIB, "the driver knows better than the worker"


BATCH_S = 0.5
EVALUATION_S = 4.0
EPOCHS, BATCHES, EVALUATED = 14, 20, 5


def metrics_of(
    loops: TrainingLoops, now: float, steps: int, bars: ProgressBars | None = None
) -> Metrics:
    """What a rank reports of its loops."""
    bars = bars or ProgressBars()
    latest = loops.latest
    return report(
        now,
        steps,
        loop_name=latest.name,
        epoch=latest.epoch,
        batches=latest.batches,
        total_batches=latest.total_batches,
        outer=loops.around(now, steps) or bars.around(latest, now, steps),
        bars=bars.shown(),
    )


class TqdmBar:
    """What is read of a bar of tqdm, by the clock of the test."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.n, self.elapsed_s = name, total, done, 0.0

    @property
    def format_dict(self) -> dict[str, object]:
        numbers = {"n": self.n, "total": self.total, "elapsed": self.elapsed_s, "initial": 0}
        return numbers | {"rate": None, "unit_scale": False, "prefix": self.name}


class Training:
    """A training by a clock of its own: what ranks report of it, and what it will really take."""

    def __init__(
        self,
        *,
        epochs: int | None = None,
        has_outer_bar: bool = False,
        evaluates: bool = False,
        bar: TqdmBar | None = None,
    ) -> None:
        self.board = RunBoard([0], began_at=0.0)
        self._given, self._evaluates, self._bar = epochs, evaluates, bar
        self._bars = ProgressBars()
        self._loops = TrainingLoops()
        self._steps = 0
        self.now = 0.0
        self._outer = self._begin("", EPOCHS) if has_outer_bar else None

    def run(self, epochs: int, batches: int = 0) -> None:
        """So many whole epochs, and a part of the next one."""
        for epoch in range(epochs):
            self._see(epoch)
            self._loop("", BATCHES, BATCHES, BATCH_S, self._given)
            if self._evaluates:
                self._loop("evaluation", EVALUATED, EVALUATED, EVALUATION_S / EVALUATED)
            if self._outer is not None:
                self._loops.round_done(self._outer, self.now, self._steps)
        self._see(epochs)
        if batches:
            self._loop("", BATCHES, batches, BATCH_S, self._given)

    @property
    def truly_left(self) -> float:
        """Seconds until the end of all epochs, after a first epoch or a part of it."""
        epoch_s = BATCHES * BATCH_S + (EVALUATION_S if self._evaluates else 0)
        return EPOCHS * epoch_s - self.now

    def _loop(
        self, name: str, length: int, done: int, batch_s: float, epochs: int | None = None
    ) -> None:
        loop = self._begin(name, length, epochs)
        for _ in range(done):
            self.now += batch_s
            self._loops.round_done(loop, self.now, self._steps)
            self._steps += 1
            self._tell()
        if done == length:
            self._loops.end(loop)

    def _begin(self, name: str, length: int, epochs: int | None = None) -> object:
        loop = self._loops.begin(
            name, length, epochs=epochs, current_time=self.now, steps=self._steps
        )
        self._tell()
        return loop

    def _tell(self) -> None:
        self.board.now = self.now
        self.board.receive(0, metrics_of(self._loops, self.now, self._steps, self._bars))

    def _see(self, epoch: int) -> None:
        if self._bar is not None:
            if self._bar.total == EPOCHS:
                self._bar.n, self._bar.elapsed_s = epoch, self.now
            self._bars.note(self._bar, self.now, self._steps)
        row = RankStatus(rank=0, state="running", seconds=0.0, rss_bytes=2**30)
        self.board.now = self.now
        self.board.see([row])


WAYS = {
    "a number that is given": {"epochs": EPOCHS},
    "a bar of accelerator.progress": {"has_outer_bar": True},
    "a bar of tqdm": {"bar": TqdmBar("", EPOCHS)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("epochs", "batches"), [(0, 5), (0, 19), (1, 1), (6, 10), (13, 18)])
def test_where_the_epochs_are_known_the_whole_training_is_told(way, epochs, batches):
    training = Training(**copy.deepcopy(WAYS[way]))  # type: ignore[arg-type]
    training.run(epochs, batches)
    left = most_left(training.board.ranks.values(), training.board.now)
    assert left is not None
    assert left.of_what == ""
    assert left.seconds == pytest.approx(training.truly_left, rel=0.02, abs=1.0)
    line = live_html.live_line(training.board)
    assert f"epoch {epochs + 1} of 14, " in line
    assert " left · " in line
    assert f"step {epochs * BATCHES + batches} of {EPOCHS * BATCHES} (" in line
    assert f"epoch {epochs + 1} of 14, {batches} of 20" in live_html.ranks_html(training.board)


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_between_the_loops_counts_once_an_epoch_has_shown_it(way):
    training = Training(evaluates=True, **copy.deepcopy(WAYS[way]))  # type: ignore[arg-type]
    training.run(3, 10)
    left = most_left(training.board.ranks.values(), training.board.now)
    assert left is not None
    assert left.seconds == pytest.approx(training.truly_left, rel=0.02)
    steps = EPOCHS * (BATCHES + EVALUATED)
    assert f"step 85 of {steps} (" in live_html.live_line(training.board)


def test_without_a_number_of_epochs_it_says_what_is_left_of_what_and_never_less_than_nothing():
    training = Training()
    training.run(2, 5)
    line = live_html.live_line(training.board)
    assert "epoch 3, 8.0 s left in this epoch · step 45 (" in line
    named = Training(evaluates=True)
    named.run(1)
    named._loop("evaluation", EVALUATED, 2, 1.0)
    line = live_html.live_line(named.board)
    assert "evaluation, " in line
    assert " left in this loop" in line

    training = Training(epochs=EPOCHS)
    training.run(13, 2)
    training.board.now += 60.0
    left = most_left(training.board.ranks.values(), training.board.now)
    assert left is None or left.seconds >= 0
    assert "-" not in live_html.live_line(training.board)

    training = Training(bar=TqdmBar("", 100, done=40))
    training.run(1, 5)
    assert "epoch 2, 8.0 s left in this epoch" in live_html.live_line(training.board)


def test_of_bars_alone_the_outer_one_is_that_of_the_whole_and_epochs_have_their_name():
    def line(*bars: ProgressBar, outer: OuterLoop | None = None, whole: bool = False) -> str:
        board = RunBoard([0], began_at=0.0)
        board.receive(0, report(0.0, 0, bars=bars, outer=outer, bar_is_whole=whole))
        return live_html.live_line(board)

    around = OuterLoop(total=14, done=2, done_s=20.0, round_s=0.0, done_steps=0, round_steps=0)
    epochs = ProgressBar(description="epochs", done="2", total="14", fraction=2 / 14, left_s=120.0)
    unnamed = replace(epochs, description="")
    inner = ProgressBar(done="10", total="20", fraction=0.5, left_s=5.0, elapsed_s=5.0)
    assert "epoch 3 of 14, 2 min 0 s left" in line(epochs, inner, outer=around)
    assert "epoch" not in line(unnamed, inner, outer=around)
    assert "5.0 s left in this loop" in line(inner)
    # transformers' Trainer has one bar for all its steps, and says so.
    assert line(inner, whole=True).endswith("5.0 s left")


def test_a_second_training_counts_its_own_epochs_and_a_stopped_one_says_how_far_it_came():
    """As in a search for a learning rate: the same loop, from the start."""
    training = Training(epochs=2)
    training.run(2)
    training.run(1, 3)
    around = training.board.ranks[0].told.outer
    assert isinstance(around, OuterLoop)
    assert (around.done, around.total, around.round_steps) == (1, 2, 3)
    other = Training(epochs=3)
    other.run(3)
    other._loop("finetune", 7, 7, 1.0, 5)
    other._loop("finetune", 7, 2, 1.0, 5)
    around = other.board.ranks[0].told.outer
    assert around is not None
    assert (around.done, around.total, around.done_steps) == (1, 5, 7)

    stopped = Training(epochs=EPOCHS)
    stopped.run(2, 10)
    stopped.board.ending = "stopped"
    assert " · step 50 of 280 (" in final_line(stopped.board)
    finished = Training(epochs=EPOCHS)
    finished.run(EPOCHS)
    assert " · step 280 (" in final_line(finished.board)
    assert "epoch 14 of 14, 20 of 20" in final_html(finished.board)


def test_one_rank_that_draws_the_bar_tells_for_all():
    board = RunBoard([0, 1], began_at=0.0)
    around = OuterLoop(total=14, done=2, done_s=20.0, round_s=0.0, done_steps=40, round_steps=5)
    for rank in (1, 0):
        for batches in range(6):
            message = report(
                float(batches),
                40 + batches,
                epoch=3,
                batches=batches,
                total_batches=20,
                outer=around if rank == 1 else None,
            )
            board.receive(rank, message)
    board.now = 5.0
    line = live_html.live_line(board)
    assert "epoch 3 of 14, " in line
    assert "in this" not in line


class Nested:
    """Loops of `accelerator.progress` within each other, by a clock of their own."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0
        self._board, self._loops = RunBoard([0], began_at=0.0), TrainingLoops()
        self.told: list[tuple[float, float, str]] = []
        """When how much was said to be left, and of what."""

    def progress(self, rounds: int, name: str = "", epochs: int | None = None) -> Iterator[int]:
        loop = self._loops.begin(
            name, rounds, epochs=epochs, current_time=self.now, steps=self.steps
        )
        self._tell()
        try:
            for number in range(rounds):
                yield number
                if self._loops.round_done(loop, self.now, self.steps):
                    self.steps += 1
                self._tell()
        finally:
            self._loops.end(loop)

    def batches(self, rounds: int, name: str = "", epochs: int | None = None) -> None:
        for _ in self.progress(rounds, name, epochs):
            self.now += BATCH_S

    @property
    def marks(self) -> list[float]:
        return [step for step, _ in self._board.ranks[0].marks]

    def least_and_most(self, *, after: float, of_what: str = "") -> tuple[float, float]:
        """The least and the most that was said, as shares of what was really left."""
        shares = [
            said / (self.now - told_at)
            for told_at, said, said_of in self.told
            # Right before the end a second is a large share.
            if after < told_at < 0.9 * self.now and said_of == of_what
        ]
        return min(shares), max(shares)

    def _tell(self) -> None:
        self._board.now = self.now
        self._board.receive(0, metrics_of(self._loops, self.now, self.steps))
        left = most_left(self._board.ranks.values(), self.now)
        if left is not None:
            self.told.append((self.now, left.seconds, left.of_what))


@pytest.mark.parametrize("first", [0, 9])
def test_a_loop_that_holds_a_validation_now_and_then_is_over_batches(first):
    run = Nested()
    for number in run.progress(100):
        run.now += BATCH_S
        if number % 10 == first:
            run.batches(2, "validation")
    assert run.steps == pytest.approx(100 + 10 * 2, abs=1)
    assert len(run.marks) == pytest.approx(1 + 10, abs=1), "going on after it is no beginning"
    least, most = run.least_and_most(after=10.0, of_what="epoch")
    # What validations take is known of none of them.
    assert 0.7 < least <= most < 1.1
    whole = [told_at for told_at, _, of_what in run.told if not of_what]
    assert max(whole, default=0.0) < 10.0, "its rounds are no epochs"


def test_a_training_that_goes_on_counts_the_epochs_that_are_left():
    run = Nested()
    for epoch in run.progress(10):
        if epoch >= 5:
            run.batches(BATCHES)
    least, most = run.least_and_most(after=2 * BATCHES * BATCH_S)
    assert 0.9 < least <= most < 1.1
