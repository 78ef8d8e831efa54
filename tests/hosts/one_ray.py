"""One Ray cluster at a time: on two cores, two that start together come up too late for Ray."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from tests.isolation import ROOT

LOCK = ROOT / "build" / "ray.lock"
_held: list[None] = []
"""An entry for each block that this process is in: a fixture's, and a test's within."""

# How Ray is set for tests that share two cores with others.
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its workers run at nice 15, and ours with them: beside other tests they would hardly run.
    "RAY_worker_niceness": "0",
    # A raylet gives up where its helpers have not been imported after half a minute.
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_raylet_start_wait_time_s": "180",
}


@contextlib.contextmanager
def one_cluster_at_a_time() -> Iterator[None]:
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as file:
        if not _held:
            fcntl.flock(file, fcntl.LOCK_EX)
        _held.append(None)
        try:
            yield
        finally:
            _held.pop()
