"""The roll call before every collective: who has come, and to the same one?

A collective that only some processes call hangs; one that they call with different shapes returns
garbage (gloo) or kills the process. So before each of nbaccel's own collectives every process
writes into the rendezvous store what it is about to do, and reads what the others wrote:

    process 0   call 12: gather  float32 (8, 10)  train.py:31
    process 1   call 12: gather  float32 (7, 10)  train.py:31    → all raise, with both shapes
    process 2   call 11: …                  → after a while: who is missing, last seen where

The store is TCP on the host: no GPU is synchronised by it. Each process has two keys, for even and
odd calls: whoever is in call `n` has read all of call `n - 1`, so nobody misses what it overwrites.
And the keys of a missing process still say where it was last.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nbaccel import frames
from nbaccel.errors import CollectiveMismatch, CollectiveTimeout
from nbaccel.units import format_seconds

__all__ = ["DEFAULT_TIMEOUT_S", "RollCall", "of_default_group"]

DEFAULT_TIMEOUT_S = 600.0
_WORRY_S = 30.0
_NAP_S = 0.02  # at most, between two looks
_NAP_SHARE = 0.1  # of the time waited: a late process costs the others a tenth more, no CPU

# Goes with its group: nothing is left of it when the group is destroyed.
_ROLLS: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()


def of_default_group() -> RollCall:
    """The roll calls of the default process group; the first use is a collective of its own."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _ROLLS:
        _ROLLS[group] = RollCall(group.rank(), group.size())
    return _ROLLS[group]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """What one process wrote."""

    number: int
    what: str
    detail: Any
    file: str
    line: int
    function: str

    def where(self) -> str:
        if self.number < 0:
            return "not seen in any collective of nbaccel yet"
        frame = frames.Frame(file=self.file, line=self.line, function=self.function)
        text = frames.source_line(frame)
        return f"{self.what}, {frames.place(frame)}" + (f": {text}" if text else "")


class RollCall:
    """The roll calls of one process group.

    Made by :func:`of_default_group`, together with the other processes.

    Args:
        rank: This process's number.
        world_size: How many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._number = 0
        # A store outlives a process group; a second group on it must not find the first one's keys.
        token = [secrets.token_hex(4)]
        dist.broadcast_object_list(token, src=0)
        default = dist.distributed_c10d._get_default_store()  # the store the group itself uses
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"nbaccel/{token[0]}", default
        )
        for parity in (0, 1):
            self._store.set(f"{parity}/{rank}", json.dumps([-1, "", None, "", 0, ""]))

    def answer(
        self,
        what: str,
        detail: Any = None,
        *,
        same: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Any]:
        """Say what this process is about to do, and hear what the others are.

        Args:
            what: Name of the collective.
            detail: What else to tell the others; JSON.
            same: Whether all details must be equal.
            timeout_s: How long to wait for a process before giving up, in seconds.

        Returns:
            Everybody's detail, by rank.

        Raises:
            CollectiveMismatch: Others do something else, or (`same`) with another detail.
            CollectiveTimeout: Somebody did not come in time, or has left.
        """
        number, self._number = self._number, self._number + 1
        mine = json.dumps([number, what, detail, *_user_frame()])
        try:
            self._store.set(f"{number % 2}/{self._rank}", mine)
            found = self._await(number, mine, timeout_s)
        except dist.DistNetworkError as error:
            raise CollectiveTimeout(
                f"Process {self._rank} is in {_read(mine).where()}, but process 0 has "
                "left: its function returned or it died, and with it the place where processes "
                "meet. Every process must call every collective equally often; look for an `if` or "
                "a `break` around this line that process 0 does not take."
            ) from error
        self._compare(found, same)
        return [entry.detail for entry in found]

    def _await(self, number: int, mine: str, timeout_s: float) -> list[_Entry]:
        start = time.monotonic()
        worry_s = min(_WORRY_S, timeout_s / 2)
        while True:
            found = self._entries(number % 2)
            if all(entry.number == number for entry in found):
                return found
            waited = time.monotonic() - start
            if waited >= timeout_s:
                raise CollectiveTimeout(self._missing(found, mine, waited))
            if waited >= worry_s:
                worry_s = math.inf
                sys.stderr.write(f"nbaccel: {self._missing(found, mine, waited)}\n")
            time.sleep(min(_NAP_S, waited * _NAP_SHARE))

    def _entries(self, parity: int) -> list[_Entry]:
        keys = [f"{parity}/{rank}" for rank in range(self._world_size)]
        return [_read(text) for text in self._store.multi_get(keys)]

    def _missing(self, found: list[_Entry], mine: str, waited: float) -> str:
        me = _read(mine)
        before = self._entries(1 - me.number % 2)
        missing = [rank for rank, entry in enumerate(found) if entry.number != me.number]
        lines = [
            f"process {self._rank} has waited {format_seconds(waited)} in {me.where()}.",
            f"{len(missing)} of {self._world_size} processes did not come:",
        ]
        for rank in missing:
            last = max((found[rank], before[rank]), key=lambda entry: entry.number)
            seen = "last seen in " if last.number >= 0 else ""
            lines.append(f"  process {rank}: {seen}{last.where()}")
        lines.append(
            "A collective must be called by all processes, equally often. Look for an `if` or a "
            "`break` that only some of them take, or a process that is merely slow (then give "
            "InitProcessGroupKwargs(timeout=...))."
        )
        return "\n".join(lines)

    def _compare(self, found: list[_Entry], same: bool) -> None:
        names = {entry.what for entry in found}
        if len(names) > 1:
            raise CollectiveMismatch(
                "The processes call different collectives at the same time:\n"
                + "\n".join(f"  process {r}: {entry.where()}" for r, entry in enumerate(found))
                + "\nThey would wait for each other for ever. Let all of them run the same calls."
            )
        if same and any(entry.detail != found[0].detail for entry in found):
            raise CollectiveMismatch(
                f"{found[0].what} got other data on some processes:\n"
                + "\n".join(
                    f"  process {r}: {_told(entry.detail)} ({entry.where()})"
                    for r, entry in enumerate(found)
                )
                + "\nThe result would be garbage. Make them equal first: "
                "accelerator.pad_across_processes(tensor, dim=0), or gather_object for what has "
                "no fixed size."
            )


def _read(text: bytes | str) -> _Entry:
    number, what, detail, file, line, function = json.loads(text)
    return _Entry(number=number, what=what, detail=detail, file=file, line=line, function=function)


def _told(detail: Any) -> str:
    if isinstance(detail, list) and detail and isinstance(detail[0], list):
        return ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in detail)
    return str(detail)


def _user_frame() -> tuple[str, int, str]:
    """File, line and function of the innermost code that is not in a library."""
    found = sys._getframe(1)
    while found.f_back is not None:
        frame = frames.Frame(
            file=found.f_code.co_filename, line=found.f_lineno, function=found.f_code.co_name
        )
        if not frame.is_library:
            return frame.file, frame.line, frame.function
        found = found.f_back
    return found.f_code.co_filename, found.f_lineno, found.f_code.co_name
