"""What is done to workers that are to give up a call, in which order, and after how long."""

from __future__ import annotations

import pytest

from nbaccel.calls import shutdown, supervisor
from nbaccel.calls.shutdown import AFTER_LOSS, END_WORKERS, KEEP_WORKERS, ShutdownLadder
from nbaccel.workers.worker_processes import HandleState


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


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


def test_a_launchs_worker_that_does_nothing_is_ended_within_bounds(clock: Clock) -> None:
    worker = Worker()
    ladder = ShutdownLadder([worker], END_WORKERS.on_failure)
    assert go_on(ladder, clock) == [0.25, 0.05, 0.2, 0.1, 5.0]
    assert worker.done == ["ask", "interrupt", "terminate", "kill"]
    assert ladder.due() is None
    assert not ladder.has_cut


def test_a_pools_worker_is_cut_off_before_it_is_killed(clock: Clock) -> None:
    worker = Worker()
    ladder = ShutdownLadder([worker], KEEP_WORKERS.on_stop)
    assert go_on(ladder, clock) == [0.05, 0.2, 1.0, 5.0]
    assert worker.done == ["ask", "interrupt", "tell", "interrupt", "kill"]
    assert ladder.has_cut


def test_after_a_failure_elsewhere_nobody_will_complete_the_collective(clock: Clock) -> None:
    worker = Worker()
    go_on(ShutdownLadder([worker], KEEP_WORKERS.on_failure), clock, steps=3)
    assert worker.done == ["ask", "tell", "interrupt"]


def test_all_are_interrupted_at_once_when_all_have_said_where_they_are(clock: Clock) -> None:
    workers = [Worker(rank) for rank in range(3)]
    ladder = ShutdownLadder(workers, KEEP_WORKERS.on_stop)
    ladder.advance()
    for worker in workers:
        assert [w.done for w in workers] == [["ask"]] * 3
        ladder.answered(worker)
        ladder.advance()
    assert [w.done for w in workers] == [["ask", "interrupt"]] * 3


def test_who_cannot_say_where_it_is_is_not_waited_for(clock: Clock) -> None:
    worker = Worker(answers=False)
    ShutdownLadder([worker], END_WORKERS.on_stop).advance()
    assert worker.done == ["ask", "interrupt"]


@pytest.mark.parametrize("policy", [END_WORKERS, KEEP_WORKERS])
def test_who_has_not_come_to_life_is_killed_and_never_interrupted(policy, clock: Clock) -> None:
    worker = Worker(answers=False, state=HandleState.FORKED)
    ShutdownLadder([worker], policy.on_stop).advance()
    assert worker.done == ["ask", "kill"]


def test_who_unwinds_gets_time_for_it_once(clock: Clock) -> None:
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


def test_a_second_stop_kills(clock: Clock) -> None:
    worker = Worker()
    ladder = ShutdownLadder([worker], END_WORKERS.on_failure)
    ladder.advance()
    ladder.hurry()
    ladder.advance()
    assert worker.done == ["kill"]
    ladder.hurry()
    assert go_on(ladder, clock) == [5.0]
    assert worker.done == ["kill"]


def test_who_is_through_has_nothing_done_to_it(clock: Clock) -> None:
    worker, other = Worker(0), Worker(1)
    ladder = ShutdownLadder([worker, other], KEEP_WORKERS.on_stop)
    ladder.finished(worker)
    assert not ladder.is_over
    ladder.finished(other)
    assert ladder.is_over
    assert go_on(ladder, clock) == []
    assert worker.done == []


def test_after_a_loss_the_others_are_asked_and_killed(clock: Clock) -> None:
    worker = Worker()
    assert go_on(ShutdownLadder([worker], AFTER_LOSS), clock) == [0.1, 5.0]
    assert worker.done == ["ask", "kill"]


# ------------------------------------------------------------------------- who is through


def test_those_that_are_through_exit_when_nobody_is_at_work(clock: Clock) -> None:
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


def test_one_that_returns_long_after_another_has_its_own_time_to_exit(clock: Clock) -> None:
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
