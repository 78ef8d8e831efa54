"""Where the ranks of a call are: which wait in a collective, and which may exit.

Now and then it looks for ranks that have done next to nothing since. If there are some, all are
asked where they are, as at the end of a call that has taken too long; a panel shows it. One that
waits in the same collective for long, and in another one than the others, is told of once.

[Note: exit barrier] A rank that exits closes its connections. If it does so too early, it breaks a
peer that is still connecting to it (`init_process_group` returns on one rank before it does on the
other). If it does so too late, a peer that waits for it in a collective waits for ever instead of
learning that it is gone. So a launch's rank that has returned stays until all have; and if that
takes long, until no other is seen setting up a group. Then it exits, and a peer that still depends
on it fails at once, with its name. Where a launch is ended, it stays until no other is at work: a
peer in a collective would report an error that this end has caused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from nbaccel.base.torch_private import CREATES_GROUP
from nbaccel.base.units import format_seconds
from nbaccel.train.call_check import CHECK_VARIABLE
from nbaccel.workers import time_limits
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

LOOK_S = 5.0
_LOOKS = 2  # for so many a rank waits before it is told of
_IDLE_SHARE = 0.03  # of the time: the threads of libraries use a little even while a rank waits
_CONNECTING_FUNCTIONS = {"init_process_group", "new_group", CREATES_GROUP, "init_device_mesh"}


class RankWatch:
    """Asks the ranks of one call where they are, and lets those of a launch exit."""

    def __init__(self, members: Sequence[WorkerHandle], *, lets_exit: bool) -> None:
        self._members = members
        self._lets_exit = lets_exit
        self._look_at = time.monotonic() + LOOK_S
        self._answers_at: float | None = None
        """When all that were asked have had time to answer; None if none was asked."""
        self._exit_look_at: float | None = None
        """When ranks at work are asked for the sake of those that wait to exit, if some do."""
        self._overdue_at: float | None = None
        """When those that may exit must have."""
        self._released: set[int] = set()
        self._cpu_s: dict[int, float] = {}
        self._idle_ranks: frozenset[int] = frozenset()
        """Those that had done next to nothing when all were asked for it."""
        self._doing: dict[int, tuple[RankActivity, int]] = {}
        """Idle rank → what it was doing when it was asked last, and at how many looks before that
        it was doing the same."""
        self._told_waits: set[tuple[int, RankActivity]] = set()

    def note_return(self) -> None:
        """A launch's worker has returned."""
        if self._exit_look_at is None:
            self._exit_look_at = time.monotonic() + time_limits.EXIT_RECHECK_S

    def doing(self, rank: int) -> str:
        """`waiting in barrier (Cell In[2], line 4)`; empty for one that is at work."""
        return str(self._doing[rank][0]) if rank in self._doing else ""

    def due(self) -> float | None:
        """When `advance` has something to do (CLOCK_MONOTONIC); None if there is nothing to do."""
        if self._lets_exit and not self._busy():
            # No rank is at work any more: those that wait may exit at once.
            return 0.0 if self._waiting() else self._overdue_at
        if self._answers_at is not None:
            return self._answers_at
        return min(self._look_at, self._exit_look_at or self._look_at)

    def is_overdue(self) -> bool:
        """Whether workers that may exit and have not must be ended.

        They have handed over all they had. One that does not exit (stopped by a signal, or stuck in
        a library's clean-up), or whose end is not reported, must not keep the notebook waiting.
        """
        is_late = self._overdue_at is not None and time.monotonic() >= self._overdue_at
        return is_late and not self._busy() and not self._waiting()

    def advance(self) -> str:
        """Do what is due. Returns a notice for the user; empty for none."""
        now = time.monotonic()
        due_at = self.due()
        if due_at is None or now < due_at:
            return ""
        busy = self._busy()
        if self._lets_exit and not busy:
            self._release(now)
            return ""
        if self._answers_at is not None:
            self._answers_at = None
            return self._read_answers(busy, now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._idle_ranks = self._find_idle(_running(busy))
            for rank in self._doing.keys() - self._idle_ranks:
                del self._doing[rank]
        if self._idle_ranks or (self._exit_look_at is not None and now >= self._exit_look_at):
            self._answers_at = now + time_limits.ANSWER_S
            for member in busy:
                # Or the old dump would be taken for the answer.
                _forget_answer(member)
                member.ask_where()
        return ""

    def _read_answers(self, busy: Sequence[WorkerHandle], now: float) -> str:
        # A rank that sets up a group may still need the connections of one that has returned.
        are_connecting = any(map(_sets_up, busy))
        activities = {m.rank: RankActivity.of_stack(m.stack) for m in _running(busy)}
        for member in busy:
            _forget_answer(member)
        if self._exit_look_at is not None and now >= self._exit_look_at:
            if are_connecting:
                self._exit_look_at = now + time_limits.EXIT_RECHECK_S
            else:
                self._release(now)
        return self._judge(activities) if self._idle_ranks else ""

    def _busy(self) -> list[WorkerHandle]:
        return [member for member in self._members if member.is_busy]

    # ---- exits

    def _waiting(self) -> list[WorkerHandle]:
        """Workers that have handed over what they had, and may not exit yet."""
        return [
            member
            for member in self._members
            if member.state in (HandleState.RETURNED, HandleState.FAILED)
            and member.rank not in self._released
        ]

    def _release(self, now: float) -> None:
        self._exit_look_at = None
        for member in self._waiting():
            # Of the last one: another may have been let go hours before. A worker gives up by
            # itself what takes longer than `EXIT_S`, and says so.
            self._overdue_at = now + time_limits.EXIT_S + time_limits.UNWIND_S
            self._released.add(member.rank)
            member.let_exit()
            # A stopped process (SIGSTOP) would not read the message.
            member.wake()

    # ---- collectives

    def _find_idle(self, running: Iterable[WorkerHandle]) -> frozenset[int]:
        cpu_before = self._cpu_s
        uses = {member.rank: member.starter.use_of(member.pid) for member in running}
        self._cpu_s = {rank: use.cpu_s for rank, use in uses.items() if use is not None}
        return frozenset(
            rank
            for rank, cpu_s in self._cpu_s.items()
            if rank in cpu_before and cpu_s - cpu_before[rank] < _IDLE_SHARE * LOOK_S
        )

    def _judge(self, activities: dict[int, RankActivity]) -> str:
        idle = {rank: one for rank, one in activities.items() if rank in self._idle_ranks}
        self._idle_ranks = frozenset()
        before = self._doing
        self._doing = {
            rank: (one, before[rank][1] + 1 if rank in before and before[rank][0] == one else 0)
            for rank, one in idle.items()
        }
        lasting = {
            (rank, one)
            for rank, (one, num_looks) in self._doing.items()
            if one.collective and num_looks >= _LOOKS
        }
        calls = {(activity.collective, activity.is_comparing) for activity in activities.values()}
        have_all_come = len(calls) == 1 and len(activities) == len(self._members)
        if not lasting or have_all_come or lasting & self._told_waits:
            return ""
        self._told_waits = lasting
        waiting_ranks = ", ".join(str(rank) for rank in sorted(rank for rank, _ in lasting))
        lines = [
            f"nbaccel: not all ranks have come to a collective, where rank {waiting_ranks} waited "
            f"for more than {format_seconds(_LOOKS * LOOK_S)}:"
        ]
        for member in self._members:
            state_words = "starting" if member.is_busy else "has finished"
            lines.append(f"  rank {member.rank}: {activities.get(member.rank) or state_words}")
        lines.append(
            "All ranks must call it, equally often and with equal shapes. Look for an `if` or a "
            "`break` that only some of them take, or for a rank that is merely slow. "
            f"{CHECK_VARIABLE}=always compares every call of nbaccel's collectives."
        )
        return "\n".join(lines)


def _running(members: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    return [member for member in members if member.state is HandleState.RUNNING]


def _sets_up(member: WorkerHandle) -> bool:
    """Whether it sets up a process group, or itself."""
    return member.state is not HandleState.RUNNING or any(
        frame.function in _CONNECTING_FUNCTIONS for frame in member.stack
    )


def _forget_answer(member: WorkerHandle) -> None:
    # What is written at a crash belongs to the report of the death.
    if not member.has_crashed:
        member.stack_text = ""
