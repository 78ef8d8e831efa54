"""How many threads the libraries of a worker compute with, those loaded before the fork included.

They read their variables when they are loaded, which was not in the worker: each has to be told.

OpenBLAS, which numpy and scipy bring, is told in the template. A process that tells it anew after a
fork gets all its threads back, as many as the machine has cores, and they wait in a busy loop for
work that may never come. The template's next fork ends them again (pthread_atfork), and its worker
inherits the number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

_KEEPS_NUMBER_OVER_FORK = "openblas"
_found_libraries: list[Any] = []


def find_libraries() -> None:
    """Look for loaded libraries that compute with threads, for all workers forked afterwards."""
    from threadpoolctl import ThreadpoolController

    _found_libraries[:] = ThreadpoolController().lib_controllers


def set_before_fork(num_threads: int) -> None:
    """Tell OpenBLAS, in a process that is about to fork: the child inherits the number."""
    if num_threads:
        _set_where_different(
            [known for known in _found_libraries if known.internal_api == _KEEPS_NUMBER_OVER_FORK],
            num_threads,
        )


def limit_threads(num_threads: int) -> None:
    """Let the libraries of this worker compute with so many threads."""
    torch.set_num_threads(num_threads)
    # A fork of the notebook's process pays for it as said above: only where someone computes with
    # such libraries (scikit-learn), who has this loaded.
    if not _found_libraries and "threadpoolctl" in sys.modules:
        find_libraries()
    _set_where_different(_found_libraries, num_threads)


def _set_where_different(libraries: Sequence[Any], num_threads: int) -> None:
    for library in libraries:
        if library.num_threads != num_threads:
            library.set_num_threads(num_threads)
