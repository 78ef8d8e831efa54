"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Seconds; they go on when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__
