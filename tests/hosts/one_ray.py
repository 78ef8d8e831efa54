"""One Ray cluster at a time: on two cores, two that start together come up too late for Ray."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from tests.isolation import ROOT

LOCK = ROOT / "build" / "ray.lock"


@contextlib.contextmanager
def one_cluster_at_a_time() -> Iterator[None]:
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
