"""Tells, while a call runs, which ranks wait in a collective and who has not come there.

Now and then it looks for ranks that have done next to nothing since. If there are some, all are
asked where they are, as at the end of a call that has taken too long. One that waits in the same
collective as the last time, and in another one than the others, is told of once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from nbaccel.base.units import format_seconds
from nbaccel.train.call_check import CHECK_VARIABLE
from nbaccel.workers import time_limits
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = ["CollectiveWatch"]

LOOK_S = 10.0
_IDLE_SHARE = 0.01  # of the time: the threads of libraries use a little even while a rank waits


class CollectiveWatch:
    """Looks for ranks that wait for others. One per call."""

    def __init__(self) -> None:
        self._due_at = time.monotonic() + LOOK_S
        self._cpu_s: dict[int, float] = {}
        self._idle_ranks: frozenset[int] = frozenset()
        """Those that had done next to nothing when all were asked; empty if none was asked."""
        self._waits: frozenset[tuple[int, RankActivity]] = frozenset()
        self._told_waits: frozenset[tuple[int, RankActivity]] = frozenset()

    def due(self) -> float:
        """When `advance` has something to do (CLOCK_MONOTONIC)."""
        return self._due_at

    def advance(self, members: Sequence[WorkerHandle]) -> str:
        """Do what is due. Returns a notice for the user; empty for none."""
        now = time.monotonic()
        if now < self._due_at:
            return ""
        self._due_at = now + LOOK_S
        running = [member for member in members if member.state is HandleState.RUNNING]
        if self._idle_ranks:
            return self._judge(members, running)
        self._idle_ranks = self._find_idle(running)
        if self._idle_ranks:
            self._due_at = now + time_limits.ANSWER_S
            for member in running:
                _forget_answer(member)
                member.ask_where()
        return ""

    def _find_idle(self, running: Iterable[WorkerHandle]) -> frozenset[int]:
        cpu_before = self._cpu_s
        uses = {member.rank: member.starter.use_of(member.pid) for member in running}
        self._cpu_s = {rank: use.cpu_s for rank, use in uses.items() if use is not None}
        return frozenset(
            rank
            for rank, cpu_s in self._cpu_s.items()
            if rank in cpu_before and cpu_s - cpu_before[rank] < _IDLE_SHARE * LOOK_S
        )

    def _judge(self, members: Sequence[WorkerHandle], running: Iterable[WorkerHandle]) -> str:
        activities = {member.rank: RankActivity.of_stack(member.stack) for member in running}
        for member in running:
            _forget_answer(member)
        waits_before = self._waits
        self._waits = frozenset(
            (rank, activity)
            for rank, activity in activities.items()
            if activity.collective and rank in self._idle_ranks
        )
        self._idle_ranks = frozenset()
        lasting = self._waits & waits_before
        calls = {(activity.collective, activity.is_comparing) for activity in activities.values()}
        have_all_come = len(calls) == 1 and len(activities) == len(members)
        if not lasting or have_all_come or lasting & self._told_waits:
            return ""
        self._told_waits = lasting
        waiting_ranks = ", ".join(str(rank) for rank in sorted(rank for rank, _ in lasting))
        lines = [
            f"nbaccel: not all ranks have come to a collective, where rank {waiting_ranks} waited "
            f"for more than {format_seconds(LOOK_S)}:"
        ]
        lines += [
            f"  rank {member.rank}: {activities.get(member.rank) or _state_words(member)}"
            for member in members
        ]
        lines.append(
            "All ranks must call it, equally often and with equal shapes. Look for an `if` or a "
            "`break` that only some of them take, or for a rank that is merely slow. "
            f"{CHECK_VARIABLE}=always compares every call of nbaccel's collectives."
        )
        return "\n".join(lines)


def _state_words(member: WorkerHandle) -> str:
    return "starting" if member.is_busy else "has finished"


def _forget_answer(member: WorkerHandle) -> None:
    # What is written at a crash belongs to the report of the death.
    if not member.has_crashed:
        member.stack_text = ""
