"""Which calls are compared, how it is switched, and processes that end meanwhile."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch

from nbaccel import WorkerFailed
from nbaccel.errors import CollectiveTimeout, ConfigError, UnsafeMoment
from nbaccel.train.call_check import CHECK_VARIABLE, default_group_check, wanted_check
from nbaccel.train.collectives import Collectives
from nbaccel.workers.failure import FailureRecord
from tests.train.ranks import together


class CountingStore:
    """Passes requests on, and counts those that tell of a call."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.num_told = 0

    def set(self, key: str, value: str) -> None:
        self.num_told += 1
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def count_compared(c: Collectives) -> list[int]:
    """How many calls are compared: of three from one place, of three from another, and so on."""
    check = default_group_check()
    check._store = counting = CountingStore(check._store)
    counts = []
    for num_rows in (2, 2, 3):
        for _ in range(3):
            c.gather(torch.ones(num_rows))
        counts.append(counting.num_told)
    for _ in range(3):
        c.gather(torch.ones(2))
    c.gather_object(["a"])
    c.barrier()
    check._store = counting.store
    return [*counts, counting.num_told]


@pytest.mark.parametrize(
    ("check", "counts"), [("first", [2, 2, 4, 8]), ("always", [3, 6, 9, 14]), ("off", [0, 0, 0, 0])]
)
def test_the_first_two_calls_of_a_kind_and_of_a_place_are_compared(check, counts):
    assert list(together(count_compared, check=check)) == [counts] * 2


def gather_thrice(c: Collectives) -> Any:
    """In the third call one process has other shapes."""
    for turn in range(3):
        rows = c.gather(torch.ones(1 + c.place.rank * (turn == 2)))
    return rows


def test_a_later_call_that_is_new_to_one_process_is_not_made_by_it():
    """It waits, because the others do not compare what they have made before."""
    with pytest.raises(WorkerFailed, match="CollectiveTimeout") as caught:
        together(gather_thrice, timeout_s=1)
    assert re.search(r"process 1 has waited 1\.\d s in gather", str(caught.value))
    assert f"{CHECK_VARIABLE}=always compares all" in str(caught.value)


def test_different_places_of_right_calls_stop_nobody():
    def body(c: Collectives) -> Any:
        began = time.monotonic()
        for turn in range(5):
            if c.place.rank == 1 and turn > 2:
                rows = c.gather(torch.tensor([turn + 1]))
            else:
                rows = c.gather(torch.tensor([turn]))
        return rows.tolist(), time.monotonic() - began > 3

    # The second place is new to one process, which waits for a moment, twice.
    assert list(together(body)) == [([4, 5], True)] * 2


# ------------------------------------------------------------------------- the switch


def test_notebooks_workers_compare_first_calls_and_scripts_none(monkeypatch):
    for name in (CHECK_VARIABLE, "FORK_LAUNCHED", "ACCELERATE_DEBUG_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert wanted_check() == "off"
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    assert wanted_check() == "first"
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    assert wanted_check() == "always"
    monkeypatch.setenv(CHECK_VARIABLE, "Off ")
    assert wanted_check() == "off"
    monkeypatch.setenv(CHECK_VARIABLE, "memory")
    with pytest.raises(ConfigError, match=r"must be one of first, always, off: got 'memory'"):
        wanted_check()


# ------------------------------------------------------------------------- ending


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_process_whose_function_has_returned_is_told_at_once(leaver):
    def body(c: Collectives) -> Any:
        c.barrier("warm up")
        if c.place.rank == leaver:
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            c.gather(torch.ones(1))
        # By that a launch knows it for a consequence.
        record = FailureRecord.of_error(0, caught.value, failure_time=0)
        return str(caught.value), record.is_consequence

    text, is_consequence = together(body, timeout_s=60)[1 - leaver]
    assert text.startswith(f"Process {1 - leaver} is in gather, test_call_check.py:")
    left = f"process {leaver} has left: its function returned or it died (last seen in warm up"
    assert left in text
    assert is_consequence


def test_a_forked_child_cannot_take_its_parents_place():
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
