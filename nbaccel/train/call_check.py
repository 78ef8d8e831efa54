"""Before a collective, the processes of a group compare what they are about to do.

    process 0   call 12: gather  float32 (8, 10)  train.py:31
    process 1   call 12: gather  float32 (7, 10)  train.py:31    → all raise, with both shapes
    process 2   call 11: …                  → after a while: who is missing, last seen where

Comparing before, not after: gloo answers different shapes with garbage, or ends the process. It
synchronises no GPU. There are two entries per process, for even and odd calls: a process in call
`n` has read all of call `n - 1`, so none is overwritten unread. And the entries of a missing
process still say where it was last. `entry_exchange` says how entries reach the others.
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from nbaccel.base import spent_time, torch_private
from nbaccel.base.errors import CollectiveMismatch, CollectiveTimeout, UnsafeMoment
from nbaccel.base.log import write_notice
from nbaccel.base.units import format_seconds
from nbaccel.train import page_setup
from nbaccel.train.announced_calls import (
    AnnouncedCall,
    Entry,
    describe_detail,
    encode_call,
    user_place,
)
from nbaccel.train.entry_exchange import EntryExchange

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "CollectiveCheck",
    "calls_begun",
    "default_group_check",
    "forget_left_groups",
]


DEFAULT_TIMEOUT_S = 600.0
_WARN_AFTER_S = 30.0
_SHOW_AFTER_S = 0.2  # a wait after which a process shows its entry to other hosts, too

# Weak keys: a check ends with its group, and a new group at the same address gets a new one.
_CHECKS_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveCheck] = (
    weakref.WeakKeyDictionary()
)


def default_group_check() -> CollectiveCheck:
    """The check of the default process group; the first use is itself a collective."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()  # a live worker joins the group here
    process_group: Any = dist.group.WORLD
    check = _CHECKS_BY_GROUP.get(process_group)
    if check is None:
        forget_left_groups()
        check = _CHECKS_BY_GROUP[process_group] = CollectiveCheck(rank, world_size)
    return check


def forget_left_groups() -> None:
    """Give back the memory of groups that this process has left, and tell those who wait there."""
    # Something else may hold the group itself: a worker keeps all it has been in.
    groups = torch_private.process_groups()
    for process_group in list(_CHECKS_BY_GROUP):
        if process_group not in groups:
            del _CHECKS_BY_GROUP[process_group]


def calls_begun() -> int:
    """How many calls this process has announced in the default group; 0 where there is none."""
    process_group: Any = dist.group.WORLD if dist.is_initialized() else None
    check = None if process_group is None else _CHECKS_BY_GROUP.get(process_group)
    return 0 if check is None else check.calls_begun


class CollectiveCheck:
    """Compares the calls of the processes of one group.

    Made by :func:`default_group_check`, together with the other processes.

    Args:
        rank: This process's number.
        world_size: How many there are.

    Raises:
        ConfigError: The variable that chooses the way of comparing is wrong, or differs.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._process_id = os.getpid()
        self.calls_begun = 0
        """How many calls this process has announced."""
        # Whoever comes to the first call early waits for the others here, not in the exchange.
        with spent_time.communicating:
            meeting = page_setup.set_up_page(rank, world_size)
        self.hosts = meeting.hosts
        """The ranks that share memory, host by host."""
        self._is_on = meeting.route != "off"
        self._exchange = EntryExchange(rank, meeting)

    @property
    def data_bytes(self) -> int:
        """How much data can go along with a call; 0 for none."""
        return self._exchange.data_bytes if self._is_on else 0

    def announce(
        self, what: str, detail: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Announce this process's call, and read what the others announced.

        Args:
            what: Name of the collective.
            detail: Further information for the others; JSON.
            timeout_s: How long to wait for a process before giving up, in seconds.

        Returns:
            The details of all processes, by rank.

        Raises:
            CollectiveMismatch: Others do something else.
            CollectiveTimeout: A process did not call in time, or has ended.
        """
        entries = self._exchange_entries(encode_call(what, detail), None, timeout_s)
        # After all have come: a mismatch is raised on every process, so none is left waiting.
        _check_names(entries)
        return [json.loads(entry.call_text)[1] for entry in entries]

    def compare(
        self,
        what: str,
        detail: Any = None,
        data: Sequence[memoryview] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[memoryview] | None:
        """Announce a call that must be the same everywhere, and give small data along.

        Args:
            what: Name of the collective.
            detail: Further information that must be equal on all processes; JSON.
            data: Up to `data_bytes` for the others; None for none.
            timeout_s: How long to wait for a process before giving up, in seconds.

        Returns:
            The data of all processes, by rank, each piece at an `aligned` place, to be read before
            the next call; None if not all gave some.

        Raises:
            CollectiveMismatch: Others do something else, or with another detail.
            CollectiveTimeout: A process did not call in time, or has ended.
        """
        if not self._is_on:
            return None
        call_text = encode_call(what, detail)
        entries = self._exchange_entries(call_text, data, timeout_s)
        if any(entry.call_text != call_text for entry in entries):
            _check_names(entries)
            _check_details(entries)
        pieces = [entry.data for entry in entries if entry.data is not None]
        return pieces if len(pieces) == len(entries) else None

    def _exchange_entries(
        self, call_text: bytes, data: Sequence[memoryview] | None, timeout_s: float
    ) -> list[Entry]:
        """The entries of all processes for this call, by rank."""
        if os.getpid() != self._process_id:
            raise UnsafeMoment(
                f"Process {os.getpid()} was forked from process {self._rank} of the group, and "
                f"calls {json.loads(call_text)[0]}. It would send as its parent, and the "
                "others would get wrong data. Call collectives in the parent only."
            )
        entry = Entry(self.calls_begun, call_text, user_place())
        self.calls_begun += 1
        wait = _Wait(self._exchange, entry, self._rank, timeout_s)
        try:
            with spent_time.communicating:
                return self._exchange.exchange(entry, data, wait.look_around)
        except dist.DistNetworkError as error:
            message = wait.describe_left(0, ", and with it the store through which processes meet")
            raise CollectiveTimeout(message) from error


class _Wait:
    """What a process does and says while others do not come to its call.

    Args:
        exchange: The entries.
        own_entry: This process's.
        rank: This process's number.
        timeout_s: How long to wait, in seconds.
    """

    def __init__(
        self, exchange: EntryExchange, own_entry: Entry, rank: int, timeout_s: float
    ) -> None:
        self._exchange = exchange
        self._own_entry = own_entry
        self._rank = rank
        self._timeout_s = timeout_s
        self._start_time = time.monotonic()
        self._show_at_s = _SHOW_AFTER_S
        # A timeout below a minute still gets its warning before the error.
        self._warn_at_s = min(_WARN_AFTER_S, timeout_s / 2)

    def look_around(self) -> None:
        """Raise or warn, if it is time to.

        Raises:
            CollectiveTimeout: Others did not come in time, or one has ended.
        """
        waited_s = time.monotonic() - self._start_time
        if waited_s >= self._show_at_s:
            self._show_at_s = math.inf
            self._exchange.show(self._own_entry)
        ended_rank = self._exchange.ended_rank(self._own_entry.call_number)
        if ended_rank is not None:
            # The cause lets a launch look for the failure of that process instead.
            last_entry = self._exchange.known_entries(self._own_entry.call_number)[ended_rank]
            message = self.describe_left(ended_rank, f" ({_last_seen(last_entry)})")
            raise CollectiveTimeout(message) from ConnectionResetError(
                f"connection closed: process {ended_rank} has ended"
            )
        if waited_s >= self._timeout_s:
            raise CollectiveTimeout(self._describe_missing(waited_s))
        if waited_s >= self._warn_at_s:
            self._warn_at_s = math.inf
            write_notice(f"nbaccel: {self._describe_missing(waited_s)}\n")

    def describe_left(self, rank: int, also: str = "") -> str:
        """The message about a process that has left.

        Args:
            rank: Its number.
            also: What is gone with it.
        """
        call = AnnouncedCall.of(self._own_entry).describe()
        return (
            f"Process {self._rank} is in {call}, but process {rank} has left: its function "
            f"returned or it died{also}. Every process must call every collective equally often; "
            f"look for an `if` or a `break` around this line that process {rank} does not take."
        )

    def _describe_missing(self, waited_s: float) -> str:
        number = self._own_entry.call_number
        entries = self._exchange.known_entries(number)
        missing_ranks = [rank for rank, entry in enumerate(entries) if entry.call_number != number]
        lines = [
            f"process {self._rank} has waited {format_seconds(waited_s)} in "
            f"{AnnouncedCall.of(self._own_entry).describe()}.",
            f"{len(missing_ranks)} of {len(entries)} processes did not come:",
        ]
        lines += [f"  process {rank}: {_last_seen(entries[rank])}" for rank in missing_ranks]
        lines.append(
            "A collective must be called by all processes, equally often. Look for an `if` or a "
            "`break` that only some of them take, or a process that is merely slow (then give "
            "InitProcessGroupKwargs(timeout=...))."
        )
        return "\n".join(lines)


def _last_seen(entry: Entry) -> str:
    prefix = "last seen in " if entry.call_number >= 0 else ""
    return prefix + AnnouncedCall.of(entry).describe()


def _check_names(entries: Sequence[Entry]) -> None:
    calls = [AnnouncedCall.of(entry) for entry in entries]
    if len({call.collective_name for call in calls}) > 1:
        raise CollectiveMismatch(
            "The processes call different collectives at the same time:\n"
            + "\n".join(f"  process {rank}: {call.describe()}" for rank, call in enumerate(calls))
            + "\nThey would wait for each other for ever. Let all of them run the same calls."
        )


def _check_details(entries: Sequence[Entry]) -> None:
    calls = [AnnouncedCall.of(entry) for entry in entries]
    if any(call.detail != calls[0].detail for call in calls):
        raise CollectiveMismatch(
            f"{calls[0].collective_name} got other data on some processes:\n"
            + "\n".join(
                f"  process {rank}: {describe_detail(call.detail)} ({call.describe()})"
                for rank, call in enumerate(calls)
            )
            + "\nThe result would be garbage. Make them equal first: "
            "accelerator.pad_across_processes(tensor, dim=0), or gather_object for what has "
            "no fixed size."
        )
