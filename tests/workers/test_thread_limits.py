"""Libraries of workers that were loaded before the fork compute with as many threads as asked."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController

from nbaccel import RunConfig, notebook_launcher
from nbaccel.workers.fork_safety import native_threads

NUM_RANKS = 2
SIZE = 700  # rows and columns of matrices that OpenBLAS multiplies with all its threads


def numbers_of_threads() -> dict[str, Any]:
    """In a worker: those that libraries have, and those that run."""
    at_first = len(native_threads()) - threading.active_count()
    matrix = np.ones((SIZE, SIZE))
    matrix @ matrix
    return {
        "torch": torch.get_num_threads(),
        "libraries": {
            library.num_threads
            for library in ThreadpoolController().lib_controllers
            if library.internal_api == "openblas"
        },
        "native at first": at_first,
        "native after a product": len(native_threads()) - threading.active_count(),
    }


def launched(number: int, start_method: str = "template") -> list[dict[str, Any]]:
    config = RunConfig(
        num_processes=NUM_RANKS, threads_per_process=number, start_method=start_method
    )
    return list(notebook_launcher(numbers_of_threads, config=config))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(1, 2, 1), (2, 1)], ids=str)
def test_each_launch_has_its_own_number(numbers):
    for number in numbers:
        for found in launched(number):
            assert (found["torch"], found["libraries"]) == (number, {number})


def test_no_library_starts_threads_that_nobody_needs():
    """OpenBLAS that is told after a fork starts one for each core, and these wait busily."""
    # Rank 0 serves the store of the process group, with a thread of torch's.
    *_, found = launched(1)
    assert found["native at first"] == found["native after a product"] == 0


@pytest.mark.forks
def test_a_forked_worker_is_limited_where_the_notebook_uses_such_libraries():
    assert [found["libraries"] for found in launched(1, "fork")] == [{1}] * NUM_RANKS
