"""What comparing calls costs and keeps, how it is switched, and processes that end meanwhile."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from nbaccel import WorkerDied
from nbaccel.base import env
from nbaccel.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, UnsafeMoment
from nbaccel.train.call_check import calls_begun, default_group_check
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from nbaccel.train.page_setup import ROUTE_VARIABLE, wanted_route
from nbaccel.workers.failure import FailureRecord
from tests.train.plain_ranks import held, run_plainly
from tests.train.ranks import TWO_HOSTS, together


class CountingStore:
    """Passes requests on, and counts them by name."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.requests.append(name)
        return getattr(self.store, name)


def count_requests(collectives: Collectives) -> list[str]:
    """The requests of one collective that all others have come to already."""
    exchange = default_group_check()._exchange
    counting = CountingStore(exchange._store)
    collectives.barrier("warm up")
    # Process 0 comes last, so that it need not ask again.
    if collectives.place.rank == 0:
        time.sleep(1)
    exchange._store = counting
    collectives.gather(torch.ones(2))
    exchange._store = counting.store
    return counting.requests


def test_processes_of_one_host_ask_nobody() -> None:
    assert list(together(count_requests, n=3)) == [[]] * 3


def test_processes_of_several_hosts_ask_the_store_once_per_host() -> None:
    counts = together(count_requests, n=4, route=TWO_HOSTS)
    assert counts[0] == ["set", "multi_get"]
    # Process 0 speaks for it; one that waits for long lets the other hosts know, that is all.
    assert counts[1] in ([], ["set"])


def test_processes_without_shared_memory_ask_once_each() -> None:
    assert together(count_requests, route="store")[0] == ["set", "multi_get"]


def test_hosts_are_found_by_the_memory_they_share() -> None:
    def body(c: Collectives) -> Any:
        c.barrier()
        return default_group_check().hosts

    assert list(together(body, n=4)) == [((0, 1, 2, 3),)] * 4
    assert list(together(body, n=4, route=TWO_HOSTS)) == [((0, 1), (2, 3))] * 4
    assert list(together(body, route="store")) == [((0,), (1,))] * 2


# ------------------------------------------------------------------------- the switch


def test_switched_off_nothing_is_announced_but_what_has_to_be_exchanged() -> None:
    def body(c: Collectives) -> Any:
        c.gather(torch.ones(2))
        c.reduce(torch.ones(2))
        c.broadcast(torch.ones(2))
        c.all_objects("a")
        before = calls_begun()
        c.barrier()
        told = c.answers("who", c.place.rank)
        padded = c.pad_across_processes(torch.ones(c.place.rank + 1)).shape[0]
        return before, told, padded, calls_begun()

    assert list(together(body, route="off")) == [(0, [0, 1], 2, 3)] * 2


def test_switched_off_barriers_are_still_told_apart() -> None:
    def body(c: Collectives) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            c.barrier(f"barrier {c.place.rank}")
        return str(caught.value)

    for text in together(body, route="off"):
        assert "process 0: barrier 0" in text


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUTE_VARIABLE, "Store ")
    assert wanted_route() == "store"
    monkeypatch.setenv(ROUTE_VARIABLE, "")
    assert wanted_route() == "memory"
    monkeypatch.setenv(ROUTE_VARIABLE, "page")
    with pytest.raises(ConfigError, match=r"must be one of memory, store, off: got 'page'"):
        wanted_route()


def test_processes_with_different_ways_are_refused_on_all() -> None:
    def body(c: Collectives) -> str:
        env.update({ROUTE_VARIABLE: ("memory", "off")[c.place.rank]})
        with pytest.raises(ConfigError) as caught:
            c.barrier()
        return str(caught.value)

    for text in together(body):
        assert "differs between processes: by rank, memory, off" in text


# ------------------------------------------------------------------------- ending


@pytest.mark.parametrize("route", ["memory", TWO_HOSTS])
def test_a_process_that_is_killed_is_the_cause_and_not_those_that_waited_for_it(route: str) -> None:
    def body(c: Collectives) -> None:
        c.barrier("warm up")
        if c.place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        c.gather(torch.ones(1))

    with pytest.raises(WorkerDied, match="rank 1 of 4"):
        together(body, n=4, timeout_s=60, route=route)


def test_that_a_process_has_left_says_that_a_connection_was_lost() -> None:
    """By that a launch knows it for a consequence."""

    def body(c: Collectives) -> Any:
        c.barrier("warm up")
        page = default_group_check()._exchange._page
        if c.place.rank == 1:
            page.close(1)
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            c.barrier("next")
        record = FailureRecord.of_error(0, caught.value, failure_time=0)
        return str(caught.value), record.is_consequence

    (text, is_consequence), _ = together(body)
    assert "process 1 has left" in text
    assert is_consequence


@pytest.mark.slow
def test_a_process_that_ends_before_it_has_spoken_for_its_host_is_told() -> None:
    _, text, _ = run_plainly()["silenced"]
    assert "process 0 has left" in text


def test_a_process_that_has_left_the_group_is_told_at_once() -> None:
    text, _ = run_plainly()["leaving"]
    assert text.startswith("Process 0 is in reduce, plain_ranks.py:")
    assert "process 1 has left: its function returned or it died (last seen in warm up" in text
    assert "an `if` or a `break` around this line that process 1 does not take" in text


def test_a_process_that_has_ended_is_told_at_once() -> None:
    text, _ = run_plainly()["ending"]
    assert "process 1 has left" in text


def test_nothing_stays_mapped_or_open_when_the_group_has_gone() -> None:
    assert run_plainly()["destroying"] == [[[0, 0], [0, 1], [0, 0]]] * 2


def test_a_worker_that_keeps_its_groups_keeps_no_memory_of_those_it_left() -> None:
    def body(c: Collectives) -> Any:
        found = []
        for _ in range(3):
            again = Collectives(init_process(cpu=True), 30)
            again.gather(torch.ones(1))
            found.append(held()[1])
            torch.distributed.destroy_process_group()
        return found

    assert list(together(body)) == [[1, 1, 1]] * 2


def test_a_forked_child_cannot_take_its_parents_place() -> None:
    def body(c: Collectives) -> Any:
        c.barrier()
        child = os.fork()
        if child == 0:
            refused = 1
            try:
                c.gather(torch.ones(1))
            except UnsafeMoment as error:
                refused = 0 if "was forked from process" in str(error) else 2
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        # The parent's own place is still its own.
        return os.waitstatus_to_exitcode(status), c.gather(torch.ones(1)).tolist()

    assert list(together(body)) == [(0, [1, 1])] * 2


def test_a_process_that_gave_up_goes_on_with_the_others() -> None:
    """It counts the call that it gave up, as the late one does."""

    def body(c: Collectives) -> Any:
        c.barrier("warm up")
        if c.place.rank == 0:
            impatient = Collectives(c.place, 0.3)
            with pytest.raises(CollectiveTimeout):
                impatient.gather(torch.zeros(1))
        else:
            time.sleep(1)
            c.gather(torch.zeros(1))
        return c.gather(torch.tensor([c.place.rank])).tolist()

    assert list(together(body)) == [[0, 1]] * 2
