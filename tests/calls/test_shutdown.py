"""What is done to workers that are to give up a call, in which order, and after how long."""

from __future__ import annotations

import pytest

from nbaccel.calls import shutdown, supervisor
from nbaccel.calls.shutdown import AFTER_LOSS, END_WORKERS, KEEP_WORKERS, ShutdownLadder
from nbaccel.workers.worker_processes import HandleState
from tests.clock import Clock


class Worker:
    """Notes what is done to it."""

    def __init__(
        self, rank: int = 0, *, answers: bool = True, state: HandleState = HandleState.RUNNING
    ) -> None:
        self.rank = rank
        self.state = state
        self.answers = answers
        self.done: list[str] = []

    @property
    def is_busy(self) -> bool:
        return self.state is HandleState.RUNNING

    def ask_where(self) -> bool:
        self.done.append("ask")
        return self.answers

    def __getattr__(self, name: str):
        return lambda *_: self.done.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (shutdown, supervisor):
        monkeypatch.setattr(module, "time", clock)
    return clock


def go_on(ladder: ShutdownLadder, clock: Clock, *, steps: int = 20) -> list[float]:
    """Advance whenever it is due; returns the seconds between."""
    waits = []
    for _ in range(steps):
        ladder.advance()
        due = ladder.due()
        if due is None:
            break
        waits.append(round(due - clock.now, 3))
        clock.now = due
    return waits


@pytest.mark.parametrize(
    ("policy", "worker", "steps", "waits", "done"),
    [
        # A launch's worker that does nothing is ended within bounds.
        (
            END_WORKERS.on_failure,
            None,
            20,
            [0.25, 0.05, 0.2, 0.1, 5],
            "ask interrupt terminate kill",
        ),
        # A pool's is cut off before it is killed.
        (KEEP_WORKERS.on_stop, None, 20, [0.05, 0.2, 1, 5], "ask interrupt tell interrupt kill"),
        # After a failure elsewhere nobody will complete the collective.
        (KEEP_WORKERS.on_failure, None, 3, None, "ask tell interrupt"),
        (AFTER_LOSS, None, 20, [0.1, 5], "ask kill"),
        # Who cannot say where it is is not waited for.
        (END_WORKERS.on_stop, "silent", 1, None, "ask interrupt"),
        # Who has not come to life is never interrupted.
        (END_WORKERS.on_stop, "unborn", 1, None, "ask kill"),
        (KEEP_WORKERS.on_stop, "unborn", 1, None, "ask kill"),
    ],
)
def test_what_is_done_to_a_worker_in_which_order(policy, worker, steps, waits, done, clock):
    state = HandleState.FORKED if worker == "unborn" else HandleState.RUNNING
    worker = Worker(answers=worker is None, state=state)
    ladder = ShutdownLadder([worker], policy)
    found = go_on(ladder, clock, steps=steps)
    assert worker.done == done.split()
    if waits is not None:
        assert found == waits
        assert ladder.due() is None
        assert ladder.has_cut == ("tell" in done)


def test_all_are_interrupted_at_once_when_all_have_said_where_they_are(clock):
    workers = [Worker(rank) for rank in range(3)]
    ladder = ShutdownLadder(workers, KEEP_WORKERS.on_stop)
    ladder.advance()
    for worker in workers:
        assert [w.done for w in workers] == [["ask"]] * 3
        ladder.answered(worker)
        ladder.advance()
    assert [w.done for w in workers] == [["ask", "interrupt"]] * 3


def test_who_unwinds_gets_time_for_it_once(clock):
    worker = Worker()
    ladder = ShutdownLadder([worker], END_WORKERS.on_stop)
    ladder.unwinds(worker)  # nobody has interrupted it yet
    go_on(ladder, clock, steps=2)
    assert worker.done[-1] == "interrupt"
    clock.now -= 0.1
    ladder.unwinds(worker)
    assert ladder.due() == clock.now + 3.0
    clock.now += 1.0
    ladder.unwinds(worker)
    assert ladder.due() == clock.now + 2.0


def test_a_second_stop_kills_and_who_is_through_has_nothing_done_to_it(clock):
    worker = Worker()
    ladder = ShutdownLadder([worker], END_WORKERS.on_failure)
    ladder.advance()
    ladder.hurry()
    ladder.advance()
    assert worker.done == ["kill"]
    ladder.hurry()
    assert go_on(ladder, clock) == [5.0]
    assert worker.done == ["kill"]

    worker, other = Worker(0), Worker(1)
    ladder = ShutdownLadder([worker, other], KEEP_WORKERS.on_stop)
    ladder.finished(worker)
    assert not ladder.is_over
    ladder.finished(other)
    assert ladder.is_over
    assert go_on(ladder, clock) == []
    assert worker.done == []


def test_those_that_are_through_exit_when_nobody_is_at_work(clock):
    states = (HandleState.RUNNING, HandleState.RETURNED, HandleState.FAILED)
    busy, *through = (Worker(rank, state=state) for rank, state in enumerate(states))
    watch = supervisor.RankWatch([busy, *through], lets_exit=True)
    watch.advance()
    assert [worker.done for worker in through] == [[], []]
    busy.state = HandleState.GONE
    assert watch.due() == 0.0
    watch.advance()
    assert [worker.done for worker in through] == [["let_exit"]] * 2
    assert watch.due() == 113.0
    assert not watch.is_overdue()
    clock.now = 113.0
    assert watch.is_overdue()


def test_one_that_returns_long_after_another_has_its_own_time_to_exit(clock):
    early, late = Worker(0, state=HandleState.RETURNED), Worker(1, state=HandleState.GONE)
    watch = supervisor.RankWatch([early, late], lets_exit=True)
    watch.advance()
    assert early.done == ["let_exit"]
    late.state = HandleState.RETURNED
    clock.now = 4000.0
    watch.advance()
    assert late.done == ["let_exit"]
    assert not watch.is_overdue()
    assert watch.due() == 4013.0
