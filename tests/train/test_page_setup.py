"""Who shares memory with whom; where there is none to share, the store serves instead."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.errors import CollectiveMismatch
from nbaccel.train import page_setup
from nbaccel.train.call_check import default_group_check
from nbaccel.train.collectives import Collectives
from tests.hosts import netns
from tests.train.plain_ranks import run_plainly
from tests.train.ranks import together

ALL_APART = ((0,), (1,), (2,))


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """In it, this process can open no file, neither one of memory nor one in /proc."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def met(collectives: Collectives) -> Any:
    """The hosts that were found, and what collectives give there."""
    rank = collectives.place.rank
    gathered = collectives.gather(torch.tensor([rank])).tolist()
    told = collectives.answers("who", rank)
    with pytest.raises(CollectiveMismatch, match="process 2: float32"):
        collectives.reduce(torch.ones(rank + 1))
    return default_group_check().hosts, gathered, told


@pytest.mark.parametrize("poor", [0, 1, 2])
def test_if_one_cannot_open_the_memory_none_uses_it(poor: int) -> None:
    """Process 0 would have made it."""

    def body(c: Collectives) -> Any:
        torch.distributed.barrier()  # gloo has opened what it needs
        suggestion = page_setup._suggest_host()  # which is read from a file, too
        page_setup._suggest_host = lambda: suggestion
        with no_more_files() if c.place.rank == poor else contextlib.nullcontext():
            c.barrier("processes meet at the first call")
        return met(c)

    expected = (ALL_APART, [0, 1, 2], [0, 1, 2])
    assert list(together(body, n=3)) == [expected] * 3


def test_a_system_without_memory_files_uses_the_store() -> None:
    def body(c: Collectives) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.delattr(os, "memfd_create")
            c.barrier("processes meet at the first call")
        return met(c)

    assert together(body, n=3)[2] == (ALL_APART, [0, 1, 2], [0, 1, 2])


def test_a_process_that_cannot_say_where_it_is_counts_as_a_host_of_its_own() -> None:
    def body(c: Collectives) -> Any:
        if c.place.rank == 1:
            page_setup._BOOT_NUMBER = Path("/proc/nothing/of/the/kind")
        return met(c)

    assert list(together(body, n=3)) == [(((0, 2), (1,)), [0, 1, 2], [0, 1, 2])] * 3


@netns.needs_hosts
def test_processes_that_only_seem_to_be_on_one_host_are_found_out() -> None:
    expected = [[[0], [1]], [0, 1]]
    assert run_plainly()["apart"] == [[False, *expected], [True, *expected]]


def test_hosts_need_not_have_neighbouring_numbers() -> None:
    def body(c: Collectives) -> Any:
        rank = c.place.rank
        page_setup._suggest_host = lambda: ("even", "odd")[rank % 2]
        gathered = c.gather(torch.tensor([rank])).tolist()
        return default_group_check().hosts, gathered, c.answers("who", rank)

    expected = (((0, 2), (1, 3)), [0, 1, 2, 3], [0, 1, 2, 3])
    assert list(together(body, n=4)) == [expected] * 4
