"""A rank that waits for others is told of, with the place of each."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, Pool, notebook_launcher
from nbaccel.calls import supervisor
from nbaccel.workers.worker_processes import HandleState

LOOK_S = 1.5


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", LOOK_S)


def shown(capfd: pytest.CaptureFixture[str]) -> str:
    texts = capfd.readouterr()
    return texts.out + texts.err


def test_a_launch_says_who_waits_and_where_the_others_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def train() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            time.sleep(7 * LOOK_S)
            dist.barrier()

    notebook_launcher(train, num_processes=2)
    text = shown(capfd)
    assert "where rank 0 waited for more than 3.0 s:" in text
    assert re.search(r"rank 0: waiting in barrier \(test_rank_watch.py:\d+\)", text)
    assert re.search(r"rank 1: running \(test_rank_watch.py:\d+\)", text)
    assert text.count("not all ranks have come") == 1


def test_a_cell_says_it_of_a_rank_that_compares_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    """Its shapes are new, and the other ones are in the collective already."""
    with Pool(2, namespace={}, timeout=10 * LOOK_S) as pool:
        pool.run(
            "import torch\nfrom nbaccel import Accelerator\naccelerator = Accelerator(cpu=True)"
        )
        with pytest.raises(TimeoutError):
            pool.run(
                "for turn in range(3):\n"
                "    rows = 1 + accelerator.process_index * (turn == 2)\n"
                "    accelerator.gather(torch.ones(rows))"
            )
    text = shown(capfd)
    assert re.search(r"rank 0: waiting in gather \(", text)
    assert re.search(r"rank 1: waiting before gather, to compare calls \(", text)
    assert "NBACCEL_COLLECTIVE_CHECK=always" in text


def test_ranks_that_wait_for_no_rank_are_not_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.gather(torch.ones(1))
        time.sleep(6 * LOOK_S)

    notebook_launcher(train, num_processes=2)
    assert "not all ranks have come" not in shown(capfd)


class Worker:
    """Notes what is done to it."""

    def __init__(self, rank: int, state: HandleState) -> None:
        self.rank = rank
        self.state = state
        self.done: list[str] = []

    @property
    def is_busy(self) -> bool:
        return self.state is HandleState.RUNNING

    def __getattr__(self, name: str):
        return lambda: self.done.append(name)


def test_those_that_are_through_exit_when_nobody_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    states = (HandleState.RUNNING, HandleState.RETURNED, HandleState.FAILED)
    busy, *through = (Worker(rank, state) for rank, state in enumerate(states))
    watch = supervisor.RankWatch([busy, *through], lets_exit=True)
    watch.advance()
    assert [worker.done for worker in through] == [[], []]
    busy.state = HandleState.GONE
    assert watch.due() == 0.0
    watch.advance()
    assert [worker.done for worker in through] == [["let_exit"]] * 2
    assert watch.due() == 113.0
    assert not watch.is_overdue()
    now = 113.0
    assert watch.is_overdue()


def test_one_that_returns_long_after_another_has_its_own_time_to_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    early, late = Worker(0, HandleState.RETURNED), Worker(1, HandleState.GONE)
    watch = supervisor.RankWatch([early, late], lets_exit=True)
    watch.advance()
    assert early.done == ["let_exit"]
    late.state = HandleState.RETURNED
    now = 4000.0
    watch.advance()
    assert late.done == ["let_exit"]
    assert not watch.is_overdue()
    assert watch.due() == 4013.0
