"""Watching the workers of one launch until all have ended.

[Note: exit barrier] A rank that exits closes its connections. If it does so too early, it breaks a
peer that is still connecting to it (`init_process_group` returns on one rank before it does on the
other). If it does so too late, a peer that waits for it in a collective waits for ever instead of
learning that it is gone. So a rank that has returned stays until all have; and if that takes long,
until no other is seen setting up a group. Then it exits, and a peer that still depends on it fails
at once, with its name.

[Note: weights in memory] Where the notebook reads weights in rank 0's memory, watching ends as soon
as all have returned, with rank 0 still there; `wait_for_exit` watches the exits once they are read.
Where rank 0 may exit before the others have returned, it first writes them to the staging files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nbaccel.base.torch_private import CREATES_GROUP
from nbaccel.calls.listening import CallDisplay
from nbaccel.calls.shutdown import END_WORKERS
from nbaccel.calls.supervisor import CallResult, Supervisor
from nbaccel.output.console import Console
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.worker_group import WorkerGroup
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

_CONNECTING_FUNCTIONS = {"init_process_group", "new_group", CREATES_GROUP, "init_device_mesh"}


class LaunchSupervisor(Supervisor):
    """Watches the workers of one launch."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        console: Console,
        timeout_s: float | None,
        show: CallDisplay | None = None,
    ) -> None:
        super().__init__(group, END_WORKERS, console=console, timeout_s=timeout_s, show=show)
        self._exits = ExitBarrier(self.members)

    def run(self) -> CallResult:
        """Wait until every worker has ended."""
        self.watch()
        return CallResult(**self.facts())

    def begin(self) -> None:
        """Handle workers that have died while the others were started."""
        self.on_sentinel()

    def is_over(self) -> bool:
        """Whether all have ended."""
        return all(member.has_ended for member in self.members)

    def close_output(self) -> None:
        """Read what workers have printed that still live."""
        for member in self.members:
            if not member.has_ended:
                self.drain_output(member)

    def at_work(self) -> Iterable[WorkerHandle]:
        """Workers whose function may be running."""
        return (member for member in self.members if member.is_busy)

    def through(self) -> Iterable[WorkerHandle]:
        """Workers that stay until the others have finished."""
        return (member for member in self.members if not member.is_busy and not member.has_ended)

    def clocks(self) -> Iterator[float]:
        """When ranks that have returned are checked next."""
        if (alarm_time := self._exits.due()) is not None:
            yield alarm_time

    def on_clock(self) -> None:
        """Let ranks that have returned leave when it is time."""
        if self._exits.is_overdue():
            self.give_up()
        else:
            self._exits.advance()

    def on_message(
        self, member: WorkerHandle, worker_message: Any, file_descriptors: list[int]
    ) -> None:
        """A worker has said how far it is."""
        super().on_message(member, worker_message, file_descriptors)
        if isinstance(worker_message, messaging.Started):
            member.begin_work()
        elif isinstance(worker_message, (messaging.Returned, messaging.Failed)):
            member.finish_call()
            self._exits.note_return()
            if self._ladder is not None:
                self._ladder.finished(member)

    def on_end(self, member: WorkerHandle, exit_status: messaging.Ended) -> None:
        """A worker is gone: a failure, unless it had finished or was stopped."""
        if not member.is_busy or member.is_stopped:
            member.end()
            return
        member.end(member.record_of_death(exit_status, self._group.oom_kills))
        if self._ladder is None:
            self.give_up(failed=True)


class ExitBarrier:
    """Lets workers that have returned exit, at the right time. See [Note: exit barrier]."""

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self._members = members
        self._next_poll: float | None = None
        """When ranks at work are looked at; None if no rank waits to leave."""
        self._are_asked = False
        self._released_at: float | None = None
        self._released: set[int] = set()

    def note_return(self) -> None:
        """A worker has returned."""
        if self._next_poll is None:
            self._next_poll = time.monotonic() + time_limits.EXIT_RECHECK_S

    def due(self) -> float | None:
        """When something is to be done (CLOCK_MONOTONIC); None if there is nothing to decide."""
        if self._at_work():
            return self._next_poll
        if self._waiting():
            # No rank is at work any more: those that wait may leave at once.
            return 0.0
        return None if self._released_at is None else self._released_at + time_limits.EXIT_S

    def is_overdue(self) -> bool:
        """Whether workers that may leave and have not must be ended; not while one is at work.

        They have handed over all they had. One that does not leave (stopped by a signal, or stuck
        in a library's clean-up), or whose end is not reported, must not keep the notebook waiting.
        """
        if self._released_at is None or self._waiting() or self._at_work():
            return False
        return time.monotonic() >= self._released_at + time_limits.EXIT_S

    def advance(self) -> None:
        """Do what is due."""
        current_time = time.monotonic()
        due_time = self.due()
        if due_time is None or current_time < due_time:
            return
        busy_members = self._at_work()
        if not busy_members:
            self.release(self._waiting())
        elif not self._are_asked:
            for member in busy_members:
                # Or the old dump would be taken for the answer.
                member.forget_stack()
                member.ask_stack()
            self._are_asked = True
            self._next_poll = current_time + time_limits.ANSWER_S
        else:
            self._are_asked = False
            self._next_poll = current_time + time_limits.EXIT_RECHECK_S
            # A rank that sets up a group may still need the connections of one that has returned.
            waiting_members = self._waiting()
            if waiting_members and not any(map(_sets_up, busy_members)):
                self.release(waiting_members)

    def _at_work(self) -> list[WorkerHandle]:
        return [member for member in self._members if member.is_busy]

    def _waiting(self) -> list[WorkerHandle]:
        """Workers that have returned and may not leave yet."""
        return [
            member
            for member in self._members
            if member.state is HandleState.RETURNED and member.rank not in self._released
        ]

    def release(self, members: Iterable[WorkerHandle]) -> None:
        """Let workers that have returned exit."""
        self._next_poll = None
        self._released_at = self._released_at or time.monotonic()
        for member in members:
            self._released.add(member.rank)
            member.let_exit()


def _sets_up(member: WorkerHandle) -> bool:
    """Whether it sets up a process group, or itself."""
    return member.state is not HandleState.RUNNING or any(
        stack_frame.function in _CONNECTING_FUNCTIONS for stack_frame in member.stack
    )
