"""When a worker whose function has returned may exit.

[Note: lingering] A rank that exits closes its connections. Too early, and it breaks a peer that is
still connecting to it (`init_process_group` returns on one rank before the other is through). Too
late, and a peer that waits for it in a collective waits for ever instead of learning that it is
gone. So a rank that has returned stays until all have; and if that takes long, until no other is
seen setting up a group. Then it goes, and whoever still counts on it fails at once, with its name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from nbaccel.launch import failure, wire
from nbaccel.launch.ending import send
from nbaccel.launch.member import Member, State
from nbaccel.launch.worker import STACK_SIGNAL

_LINGER_S = 2.0
_ANSWER_S = 0.2
_LONELY_S = 15.0
_LEAVE_S = 10.0
_CONNECTING = {"init_process_group", "new_group", "_new_process_group_helper", "init_device_mesh"}


class Lingering:
    """Lets the workers that have returned go, at the right time."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)
        self._since: float | None = None
        self._asked = False
        self._next = 0.0
        self._released: float | None = None
        self._told: set[int] = set()

    def due(self) -> float | None:
        """When to call `advance` (CLOCK_MONOTONIC); None if there is nothing to decide."""
        waiting = self._waiting()
        busy = any(m.is_busy for m in self._members)
        if self._since is None and waiting:
            self._since = time.monotonic()
            self._next = self._since + _LINGER_S
        if self._since is None or not (waiting or busy):
            return None
        return self._next if busy else time.monotonic()

    def overdue(self) -> float | None:
        """When workers that were told to leave are ended; None as long as one is at work.

        They have handed over all they had. One that does not leave (stopped by somebody, or stuck
        in a library's clean-up), or whose end nobody reports, must not keep the notebook waiting.
        """
        if self._released is None or self._waiting() or any(m.is_busy for m in self._members):
            return None
        return self._released + _LEAVE_S

    def advance(self) -> str | None:
        """Do what is due. Returns a line for the user if ranks seem to wait for ever."""
        due = self.due()
        now = time.monotonic()
        if due is None or now < due:
            return None
        busy = [m for m in self._members if m.is_busy]
        if not busy:
            self._release(now)
        elif not self._asked:
            _ask(busy)
            self._asked, self._next = True, now + _ANSWER_S
        else:
            self._asked, self._next = False, now + _LINGER_S
            return self._judge(busy, now)
        return None

    def _waiting(self) -> list[Member]:
        """Who has returned and has not been told to leave."""
        return [m for m in self._members if m.state is State.RETURNED and m.rank not in self._told]

    def _judge(self, busy: list[Member], now: float) -> str | None:
        stacks = [m.stack() for m in busy]
        connecting = any(f.function in _CONNECTING for stack in stacks for f in stack)
        unborn = any(m.state is not State.RUNNING for m in busy)
        if self._waiting():
            if not (connecting or unborn):
                self._release(now)
            return None
        if self._released is None:
            return None
        doings = {m.rank: failure.doing(stack) for m, stack in zip(busy, stacks, strict=True)}
        waiting = all(text.startswith("waiting in") for text in doings.values())
        if not waiting or now < self._released + _LONELY_S:
            return None
        self._next = float("inf")  # said once
        return _lonely(self._members, doings)

    def _release(self, now: float) -> None:
        self._released = self._released or now
        for member in self._waiting():
            self._told.add(member.rank)
            with contextlib.suppress(OSError):  # it has gone by itself
                member.channel.send(wire.Leave())


def _ask(busy: Iterable[Member]) -> None:
    for member in busy:
        if member.tells_its_stack:
            member.stack_text = ""
            send(member, STACK_SIGNAL)


def _lonely(members: Iterable[Member], doings: dict[int, str]) -> str:
    done = ", ".join(str(m.rank) for m in members if not m.is_busy)
    lines = "".join(f"\n  rank {rank}: {text}" for rank, text in doings.items())
    return (
        f"nbaccel: rank {done} has returned, and every other rank waits in a collective. A "
        f"collective needs all ranks: if this one counts on it, it waits for ever.{lines}"
    )
