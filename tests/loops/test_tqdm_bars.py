"""Bars of tqdm in a function that is watched: real bars, on streams of the test."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from nbaccel.base.training_metrics import Metrics
from nbaccel.devices.cpu_xpu_mps import CpuDevice
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.loops.metrics_reporter import RunningLoop


class Told:
    """A channel that keeps what the function reports."""

    def __init__(self) -> None:
        self.messages: list[Metrics] = []

    def send(self, message: Metrics) -> None:
        self.messages.append(message)

    def try_send(self, message: Metrics) -> bool:
        self.send(message)
        return True

    @property
    def bars(self) -> list[tuple[str, str, str]]:
        return [(bar.description, bar.done, bar.total) for bar in self.messages[-1].bars]


@contextlib.contextmanager
def watched(screen: io.StringIO, *, shows_bars: bool = True) -> Iterator[Told]:
    told = Told()
    with (
        contextlib.redirect_stderr(screen),
        loop_watch.reporting_to(told, CpuDevice(), "cpu", shows_bars=shows_bars),
    ):
        yield told


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    # No thread of tqdm's is left to later tests.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    return io.StringIO()


def test_bars_are_told_and_all_other_text_comes_in_order(screen):
    logger = logging.Logger("a")  # noqa: LOG001 - no other test has it
    logger.addHandler(logging.StreamHandler(screen))
    with watched(screen) as told:
        for epoch in tqdm(range(2), desc="epochs"):
            for batch in tqdm(range(3), mininterval=0, leave=False):
                if batch == 1:
                    print("printed", epoch, file=sys.stderr)
                    logger.warning("logged %d", epoch)
            tqdm.write(f"said {epoch}", file=sys.stderr)
    per_epoch = "printed {0}\nlogged {0}\nsaid {0}\n"
    assert screen.getvalue() == per_epoch.format(0) + per_epoch.format(1)
    assert told.bars == [("epochs", "2", "2"), ("", "3", "3")]


@pytest.mark.parametrize(
    ("count", "total", "settings", "words"),
    [
        (2, 5, {}, ("", "2", "5", 0.4)),
        (5, 5, {"desc": "epoch 3: train"}, ("epoch 3: train", "5", "5", 1.0)),
        (1500, 4000, {"unit_scale": True, "unit": "B"}, ("", "1.50k", "4.00k", 0.375)),
        (7, 9, {"bar_format": "so many: {n_fmt}", "postfix": {"loss": 1}}, ("", "7", "9", 7 / 9)),
        (12, None, {"desc": "rows"}, ("rows", "12", "", None)),
    ],
)
def test_the_numbers_are_the_bar_s_own(screen, count, total, settings, words):
    with watched(screen) as told, tqdm(total=total, mininterval=0, **settings) as bar:
        bar.start_t -= 10
        bar.update(count)
    (found,) = told.messages[-1].bars
    assert (found.description, found.done, found.total, found.fraction) == words
    assert found.elapsed_s == pytest.approx(10.0, abs=0.5)
    left_s = 10.0 * (total - count) / count if total else None
    assert found.left_s == (None if left_s is None else pytest.approx(left_s, rel=0.1, abs=0.1))


def test_a_loop_that_is_through_makes_room_and_three_levels_are_the_outer_two(screen):
    with watched(screen) as told:
        list(tqdm(range(2), desc="download"))
        for _ in tqdm(range(1), desc="a"):
            for _ in tqdm(range(1), desc="b"):
                list(tqdm(range(1), desc="c"))
    described = {bar.description for message in told.messages for bar in message.bars}
    assert described <= {"download", "a", "b", "c"}
    assert [name for name, *_ in told.bars] == ["a", "c"]


def test_own_streams_other_threads_and_no_panel_have_bars_as_ever(screen):
    mine = io.StringIO()
    with watched(screen) as told:
        list(tqdm(range(3), file=mine))
        list(tqdm(range(3), "by position", 3, True, mine))
        with contextlib.redirect_stderr(io.StringIO()) as other:
            list(tqdm(range(4)))
    assert mine.getvalue().count("3/3") == 2
    assert "4/4" in other.getvalue()
    assert screen.getvalue() == ""
    assert told.messages == []

    with watched(screen) as told, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(list, tqdm(range(2), desc="made here")).result()
        pool.submit(lambda: list(tqdm(range(2), desc="made beside"))).result()
    assert "made beside: 100%" in screen.getvalue()
    assert "made here" not in screen.getvalue()
    assert [name for name, *_ in told.bars] == ["made here"]
    with watched(screen, shows_bars=False) as told:
        list(tqdm(range(2), desc="plain"))
    assert "plain: 100%" in screen.getvalue()
    assert told.messages == []


def test_a_bar_that_outlives_the_function_draws_nothing_and_nothing_stays_changed(screen):
    before = dict(vars(tqdm))
    with watched(screen):
        bar = tqdm(total=3)
        bar.update()
    with contextlib.redirect_stderr(screen):
        bar.close()
    assert screen.getvalue() == ""
    assert all(vars(tqdm)[name] is before[name] for name in ("__init__", "display", "close"))
    with contextlib.redirect_stderr(screen):
        list(tqdm(range(2), desc="of another cell"))
    assert "of another cell: 100%" in screen.getvalue()


def test_an_interrupt_in_a_bar_leaves_no_lock_to_other_threads(screen, monkeypatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(screen):  # noqa: PT012 - a bar is made in it
        bar = tqdm(total=2, mininterval=0, miniters=1)
        monkeypatch.setattr(metrics_reporter.ProgressBars, "note", interrupt)
        bar.update()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for lock in tqdm.get_lock().locks:  # type: ignore[attr-defined]
            assert pool.submit(lock.acquire, True, 5).result()
            pool.submit(lock.release).result()
    monkeypatch.undo()
    bar.disable = True


def test_a_bar_around_the_loop_over_batches_tells_of_the_whole(screen):
    bars = metrics_reporter.ProgressBars()
    with tqdm(total=4) as outer, tqdm(total=20) as inner:
        assert bars.note(outer, 0.0, 100)
        bars.note(inner, 0.0, 100)
        outer.start_t -= 9.0
        outer.n = 1
        assert not bars.note(outer, 9.0, 130)
        around = bars.around(RunningLoop(epoch=2, total_batches=20), 10.0, 135)
        assert around is not None
        assert (around.total, around.done, around.done_steps, around.round_steps) == (4, 1, 30, 5)
        assert (around.done_s, around.round_s) == (pytest.approx(9.0, abs=0.5), 1.0)
        # Not one that was left half done, nor that of the loop itself.
        assert bars.around(RunningLoop(epoch=5), 0.0, 135) is None
        assert bars.around(RunningLoop(epoch=2, is_seen=True, total_batches=4), 0.0, 135) is None
