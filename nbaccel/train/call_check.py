"""Before a collective, the processes of a group compare what they are about to do.

    process 0   call 12: gather  float32 (8, 10)  train.py:31
    process 1   call 12: gather  float32 (7, 10)  train.py:31    → all raise, with both shapes
    process 2   call 11: …                  → after a while: who is missing, last seen where

Comparing before, not after: gloo answers different shapes with garbage, or ends the process. The
calls are exchanged by the store in which the group has met, so that no device takes part.

[Note: which calls are compared] In a notebook's workers the first two of each call (name and
shapes) and of each place in the code. What calls were made before is the same on all processes of
a correct program: each may wait until all have come. The place need not be the same (`if`, `else`),
so what is compared only because its place is new waits for a moment, and goes on unchecked.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from nbaccel.base import env, frames, spent_time, torch_private
from nbaccel.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, UnsafeMoment
from nbaccel.base.log import write_notice
from nbaccel.base.units import format_seconds, number_ranges
from nbaccel.workers.rendezvous import resting_ranks, returned_key

CHECK_VARIABLE = "NBACCEL_COLLECTIVE_CHECK"
_CHECKS = ("first", "always", "off")
DEFAULT_TIMEOUT_S = 600.0
_TIMES_COMPARED = 2
_NEW_PLACE_WAIT_S = 2.0
_MOST_TOLD = 50  # calls of which entries stay in the store where deleting them would take time
# Between two looks into the store: a quarter of what has been waited, as a process that sleeps on
# when the last one has come delays them all. Blocking in it is no way, because torch prints a
# warning each time such a wait ends without its keys.
_LEAST_POLL_S = 0.0001
_MOST_POLL_S = 0.05
# Between two looks for mistakes, which are rarer than processes that come a little late.
_FIRST_LOOK_S = 0.02
_MOST_LOOK_S = 0.25

_LATEST: list[tuple[weakref.ref[dist.ProcessGroup], CollectiveCheck]] = []
"""The default process group and its check, which ends with it; empty for none yet."""


def wanted_check() -> str:
    """Which calls this process compares: ``first``, ``always`` or ``off``."""
    default = "first" if env.flag("FORK_LAUNCHED") else "off"
    if env.flag("ACCELERATE_DEBUG_MODE"):
        default = "always"
    check = (env.read(CHECK_VARIABLE, "") or "").strip().lower() or default
    if check not in _CHECKS:
        raise ConfigError(
            f"Environment variable {CHECK_VARIABLE} must be one of {', '.join(_CHECKS)}: got "
            f"{check!r}. It says which calls are compared. Correct it, or unset it for {default!r}."
        )
    return check


def default_group_check() -> CollectiveCheck:
    """The check of the default process group."""
    process_group: Any = dist.group.WORLD
    if process_group is None:
        dist.get_world_size()  # a live worker joins the group here
        process_group = dist.group.WORLD
    if not (_LATEST and _LATEST[0][0]() is process_group):
        check = CollectiveCheck(dist.get_rank(), dist.get_world_size())
        _LATEST[:] = [(weakref.ref(process_group, lambda _: _LATEST.clear()), check)]
    return _LATEST[0][1]


def _refuse_in_fork() -> None:
    for _, check in _LATEST:
        check.is_in_fork = True


if hasattr(os, "register_at_fork"):  # Windows has no forks
    # Asking for the process's number at each call takes a tenth of what the check takes.
    os.register_at_fork(after_in_child=_refuse_in_fork)


def forget_left_group() -> None:
    """Give back the memory of a group that this process has left, which others may still hold."""
    if not dist.is_initialized():
        _LATEST.clear()


def calls_begun() -> int:
    """How many calls this process has begun in the default group; 0 where there is none."""
    is_there = dist.is_initialized() and _LATEST and _LATEST[0][0]() is dist.group.WORLD
    return _LATEST[0][1].calls_begun if is_there else 0


class CollectiveCheck:
    """Compares the calls of the processes of one group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._ranks = range(world_size)
        self._check = wanted_check()
        self.is_in_fork = False  # whether it was forked from the process that is in the group
        self.calls_begun = 0  # by this process
        self._times_seen: Counter[Hashable] = Counter()
        # Calls with their places that are compared no more: one look, as it is in each call.
        self._settled: set[Hashable] = set()
        self._group_store = torch_private.default_store()
        # A store outlives a process group, and the next one must not find this one's keys.
        group_number = self._group_store.add(f"nbaccel/groups/{rank}", 1)
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"nbaccel/{group_number}", self._group_store
        )
        # Numbers of the last calls that this process told of, whose entries are in the store.
        self._told_calls: deque[int] = deque()

    def compare(
        self, what: str, detail: Hashable = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Compare this process's call with the others', if it is one of those that are compared."""
        self._begin(what)
        if self._check == "off":
            return
        place = _user_place()
        call = (what, detail, place)
        if call in self._settled:
            return
        # Before the exchange: a process that gives up has made the call as the late one will.
        self._times_seen[what, detail] += 1
        self._times_seen[call] += 1
        waits_for_all = self._check == "always" or self._times_seen[what, detail] <= _TIMES_COMPARED
        if not waits_for_all and self._times_seen[call] > _TIMES_COMPARED:
            self._settled.add(call)
            return
        entries = self._exchange(_Entry(what, detail, *place), timeout_s, waits=waits_for_all)
        if any(entry[:2] != entries[0][:2] for entry in entries):
            # The processes have counted different calls.
            self._times_seen[what, detail] -= 1
            raise _mismatch(entries)

    def announce(
        self, what: str, detail: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Tell the other processes something, and read what they tell."""
        self._begin(what)
        entries = self._exchange(_Entry(what, detail, *_user_place()), timeout_s)
        # After all have come: a mismatch is raised on every process, so none is left waiting.
        if any(entry.what != what for entry in entries):
            raise _mismatch(entries)
        return [entry.detail for entry in entries]

    def _begin(self, what: str) -> None:
        if self.is_in_fork:
            raise UnsafeMoment(
                f"Process {os.getpid()} was forked from process {self._rank} of the group, and "
                f"calls {what}: others would get wrong data. Call collectives in the parent only."
            )
        if resting := resting_ranks():
            raise CollectiveMismatch(
                f"Process {self._rank} calls {what} in a cell or call that was not given to "
                f"process {number_ranges(resting)}. It would wait for ever, because a collective "
                "needs every process. Run it on all ranks, or leave the collective out."
            )
        self.calls_begun += 1

    def _exchange(self, own: _Entry, timeout_s: float, *, waits: bool = True) -> list[_Entry]:
        """What all tell of this call; nothing where it is not waited for those that are late."""
        keys = self._keys()
        try:
            with spent_time.communicating:
                self._store.set(keys[self._rank], json.dumps(own, default=str))
                self._told_calls.append(self.calls_begun)
                self._forget_calls(_MOST_TOLD)
                if not waits:
                    timeout_s = min(timeout_s, _NEW_PLACE_WAIT_S)
                have_come = self._await_all(own, keys, timeout_s, raises=waits)
                texts = self._store.multi_get(keys) if have_come else []
                return [_Entry(*json.loads(text)) for text in texts]
        except dist.DistNetworkError as error:
            also = ", and with it the store through which processes meet"
            raise CollectiveTimeout(self._describe_returned(own, 0, also)) from error

    def _await_all(self, own: _Entry, keys: list[str], timeout_s: float, *, raises: bool) -> bool:
        start_time = time.monotonic()
        look_at_s = _FIRST_LOOK_S
        notice_at_s = timeout_s / 2
        while not self._store.check(keys):
            self._forget_calls(2)  # here it costs no time: others are waited for
            waited_s = time.monotonic() - start_time
            if waited_s >= timeout_s and not raises:
                return False
            if waited_s >= look_at_s:
                look_at_s = waited_s + min(waited_s, _MOST_LOOK_S)
                self._check_returned(own)
            if waited_s >= timeout_s:
                raise CollectiveTimeout(self._describe_missing(own, waited_s))
            if waited_s >= notice_at_s and raises:
                notice_at_s = timeout_s
                write_notice(f"nbaccel: {self._describe_missing(own, waited_s)}\n")
            time.sleep(min(_MOST_POLL_S, max(_LEAST_POLL_S, waited_s / 4)))
        return True

    def _forget_calls(self, num_kept: int) -> None:
        """Delete what older calls have left; all have left a call when they come to the next."""
        while len(self._told_calls) > num_kept:
            self._store.delete_key(_key(self._told_calls.popleft(), self._rank))

    def _keys(self) -> list[str]:
        return [_key(self.calls_begun, rank) for rank in self._ranks]

    def _missing_ranks(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys()) if not self._store.check([key])]

    def _check_returned(self, own: _Entry) -> None:
        key = returned_key()
        if not self._group_store.check([key]):
            return
        returned_ranks = {int(text) for text in self._group_store.get(key).split()}
        # Looked at last, because one may have come to this call just before it returned.
        for rank in returned_ranks.intersection(self._missing_ranks()):
            message = self._describe_returned(own, rank, f" ({self._last_seen(rank)})")
            # The cause lets a launch look for the failure of that process instead.
            raise CollectiveTimeout(message) from ConnectionResetError(
                f"connection closed: process {rank} has returned"
            )

    def _describe_returned(self, own: _Entry, rank: int, also: str) -> str:
        return (
            f"Process {self._rank} is in {own.describe()}, but process {rank} has left: its "
            f"function returned or it died{also}. Every process must call every collective equally "
            f"often; look for an `if` or `break` here that process {rank} does not take."
        )

    def _describe_missing(self, own: _Entry, waited_s: float) -> str:
        missing_ranks = self._missing_ranks()
        lines = [
            f"process {self._rank} has waited {format_seconds(waited_s)} in {own.describe()}.",
            f"{len(missing_ranks)} of {len(self._ranks)} processes did not come:",
        ]
        lines += [f"  process {rank}: {self._last_seen(rank)}" for rank in missing_ranks]
        lines.append(
            "A collective must be called by all processes, equally often. Look for an `if` or a "
            "`break` that only some take, or a slow process (InitProcessGroupKwargs(timeout=...))."
        )
        if self._check == "first":
            lines.append(
                "A process whose shapes differ may be in this very call, which it has made twice "
                f"before and compares no more: {CHECK_VARIABLE}=always compares all."
            )
        return "\n".join(lines)

    def _last_seen(self, rank: int) -> str:
        for key in [_key(number, rank) for number in reversed(self._told_calls)]:
            if self._store.check([key]):
                return f"last seen in {_Entry(*json.loads(self._store.get(key))).describe()}"
        return "not seen in a call that was compared"


class _Entry(NamedTuple):
    """What one process tells of its call. In those that were read all is as JSON has it."""

    what: str
    detail: Any
    file: str
    line: int
    function: str

    def describe(self) -> str:
        """Name and line of code."""
        frame = frames.Frame(file=self.file, line=self.line, function=self.function)
        line = frames.source_line(frame)
        return f"{self.what}, {frames.place(frame)}" + (f": {line}" if line else "")


def _key(call_number: int, rank: int) -> str:
    return f"{call_number}/{rank}"


def _user_place() -> tuple[str, int, str]:
    frame = sys._getframe(2)  # noqa: SLF001 - the only way to the frames above
    # The outermost frame is not tested: it is the answer where all code is in libraries.
    while _is_library(frame.f_code.co_filename) and (caller := frame.f_back) is not None:
        frame = caller
    code = frame.f_code
    return code.co_filename, frame.f_lineno, code.co_name


@functools.lru_cache(maxsize=4096)  # the same few files are asked for again and again
def _is_library(file_name: str) -> bool:
    return frames.Frame(file=file_name, line=0, function="").is_library


def _mismatch(entries: Sequence[_Entry]) -> CollectiveMismatch:
    if len({entry.what for entry in entries}) > 1:
        calls = [f"  process {rank}: {entry.describe()}" for rank, entry in enumerate(entries)]
        return CollectiveMismatch(
            "The processes call different collectives at the same time:\n"
            + "\n".join(calls)
            + "\nThey would wait for each other for ever. Let all of them run the same calls."
        )
    calls = [
        f"  process {rank}: {_describe_detail(entry.detail)} ({entry.describe()})"
        for rank, entry in enumerate(entries)
    ]
    return CollectiveMismatch(
        f"{entries[0].what} got other data on some processes:\n"
        + "\n".join(calls)
        + "\nThe result would be garbage. Make them equal first: "
        "accelerator.pad_across_processes(tensor, dim=0), or gather_object for what has "
        "no fixed size."
    )


def _describe_detail(detail: Any) -> str:
    if isinstance(detail, list) and detail and isinstance(detail[0], list):
        return ", ".join(f"{name.removeprefix('torch.')} {tuple(shape)}" for name, shape in detail)
    return str(detail)
