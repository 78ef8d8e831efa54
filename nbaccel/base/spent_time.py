"""Where a process's time goes while it trains: waiting for data, in collectives, the rest.

    with spent_time.reading_data:     the loader reads a batch
    with spent_time.communicating:    a collective; within reading_data, it counts as communication
    spent_time.end_step()             the first two tell what the first took to start

Only a worker that reports to a notebook keeps an account (`open_account`), of one thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

ExchangeSource = Callable[[], "float | None"]
"""Seconds for which an exchange of gradients has delayed its process so far; None: not known."""


@dataclass(frozen=True, slots=True)
class SpentTime:
    """Where one rank's time has gone since its first loop over batches began, in seconds."""

    total_s: float
    data_s: float  # waiting for batches
    communication_s: float  # in collectives, which includes waiting for other ranks there
    # Whether some exchange of gradients could not be measured; it is part of the computing.
    is_partial: bool = False
    # What the first step computed for longer than the second: libraries start in it.
    starting_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """The rest: computing, and whatever else the function does."""
        return max(0.0, self.total_s - self.data_s - self.communication_s - self.starting_s)


class TimeAccount:
    """Adds up the time of one thread by what it was spent on."""

    def __init__(self, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = read_clock
        self._thread_id = threading.get_ident()
        self._began_at: float | None = None
        self._kinds: list[str] = []  # what the thread is in, the innermost last
        self._since = 0.0
        self._seconds = {"data": 0.0, "communication": 0.0}
        # Each with its seconds before this account.
        self._exchanges: list[tuple[ExchangeSource, float]] = []
        self._exchange_s = 0.0
        self._first_step_s: float | None = None
        self._starting_s: float | None = None

    def begin(self) -> None:
        """A loop begins; what was before the first one is not counted."""
        if self._began_at is None:
            self._began_at = self._since = self._clock()
            for kind in self._seconds:
                self._seconds[kind] = 0.0

    def enter(self, kind: str) -> None:
        """The thread begins to wait."""
        if threading.get_ident() != self._thread_id:
            return
        current_time = self._clock()
        if self._kinds:
            self._seconds[self._kinds[-1]] += current_time - self._since
        self._kinds.append(kind)
        self._since = current_time

    def exit(self) -> None:
        """The thread goes on with what it was in before."""
        # Empty where the account was opened within a block.
        if threading.get_ident() != self._thread_id or not self._kinds:
            return
        current_time = self._clock()
        self._seconds[self._kinds.pop()] += current_time - self._since
        self._since = current_time

    def end_step(self) -> None:
        """A step is over; after the second one it is known what the first took to start."""
        if self._starting_s is not None or threading.get_ident() != self._thread_id:
            return
        if (spent := self.spent()) is None:
            return
        if self._first_step_s is None:
            self._first_step_s = spent.computing_s
        else:
            second_step_s = spent.computing_s - self._first_step_s
            self._starting_s = max(0.0, self._first_step_s - second_step_s)

    def add_exchange(self, source: ExchangeSource) -> None:
        """Count an exchange of gradients that a library measures itself."""
        self._exchanges.append((source, source() or 0.0))

    def spent(self) -> SpentTime | None:
        """Where the time has gone so far; None before the first loop."""
        if self._began_at is None:
            return None
        readings = [(source(), before) for source, before in self._exchanges]
        exchange_s = sum(reading - before for reading, before in readings if reading is not None)
        # A mean of samples may become smaller; what has been told is not taken back.
        self._exchange_s = max(self._exchange_s, exchange_s)
        return SpentTime(
            total_s=self._clock() - self._began_at,
            data_s=self._seconds["data"],
            communication_s=self._seconds["communication"] + self._exchange_s,
            is_partial=any(reading is None for reading, _ in readings),
            starting_s=self._starting_s or 0.0,
        )


_process_account: TimeAccount | None = None
_exchange_sources: list[ExchangeSource] = []  # also from before the present account


class _TimedBlock(contextlib.ContextDecorator):
    """A context whose time is counted; one object serves all uses, nested ones too."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        if _process_account is not None:
            _process_account.enter(self._kind)

    def __exit__(self, *exc: object) -> None:
        if _process_account is not None:
            _process_account.exit()


reading_data = _TimedBlock("data")
communicating = _TimedBlock("communication")


def open_account() -> TimeAccount:
    """Count from now on, for this thread; an earlier account of the process ends."""
    account = TimeAccount()
    for source in _exchange_sources:
        account.add_exchange(source)
    use_account(account)
    return account


def present_account() -> TimeAccount | None:
    """The process's account; None where nothing is counted."""
    return _process_account


def use_account(account: TimeAccount | None) -> None:
    """Count in this account from now on; None: count no longer."""
    global _process_account  # noqa: PLW0603 - loops and collectives have no handle on it
    _process_account = account


def begin_account() -> None:
    """A loop over batches begins."""
    if _process_account is not None:
        _process_account.begin()


def end_step() -> None:
    """A step of a loop over batches is over."""
    if _process_account is not None:
        _process_account.end_step()


def present_spent() -> SpentTime | None:
    """Where this process's time has gone so far; None where no loop has begun or none counts."""
    return None if _process_account is None else _process_account.spent()


def add_exchange(source: ExchangeSource) -> None:
    """Count what a library measures of its exchange of gradients, in this process from now on."""
    _exchange_sources.append(source)
    if _process_account is not None:
        _process_account.add_exchange(source)
