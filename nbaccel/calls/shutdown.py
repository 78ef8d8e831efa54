"""Making workers give up their call, by steps of growing force, and letting them exit.

                     launch (workers end)            pool (workers stay)
    ask where it is  stack, by signal                AskWhereabouts, to its second thread
    interrupt        KeyboardInterrupt; one that     the same; after a failure elsewhere its
                     says so gets time for its       connections are cut with it: no peer will
                     `finally` blocks                complete the collective that it waits in
    then             SIGTERM                         cut its connections, interrupt it again
    then             SIGKILL                         SIGKILL; with that the pool is lost
    then             given up                        given up

A worker that cannot be killed hangs in a driver. The notebook must not hang with it, so the last
wait is bounded too.

[Note: exit barrier] A rank that exits closes its connections. If it does so too early, it breaks a
peer that is still connecting to it (`init_process_group` returns on one rank before it does on the
other). If it does so too late, a peer that waits for it in a collective waits for ever instead of
learning that it is gone. So a launch's rank that has returned stays until all have; and if that
takes long, until no other is seen setting up a group. Then it exits, and a peer that still depends
on it fails at once, with its name.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbaccel.base.torch_private import CREATES_GROUP
from nbaccel.workers import time_limits as limits
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = [
    "AFTER_LOSS",
    "END_WORKERS",
    "KEEP_WORKERS",
    "ExitBarrier",
    "ShutdownLadder",
    "ShutdownPolicy",
    "ShutdownStep",
]

_CONNECTING_FUNCTIONS = {"init_process_group", "new_group", CREATES_GROUP, "init_device_mesh"}


class ShutdownStep(enum.Enum):
    """What can be done to a worker."""

    WAIT = enum.auto()
    ASK = enum.auto()
    INTERRUPT = enum.auto()
    CUT_AND_INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    LET_LEAVE = enum.auto()
    KILL = enum.auto()


ShutdownSteps = tuple[tuple[ShutdownStep, float], ...]
"""What is done one after the other, each with the seconds that it gets to have an effect."""

_ASK = (ShutdownStep.ASK, limits.ASK_S)
_INTERRUPT = (ShutdownStep.INTERRUPT, limits.ANSWER_S)
_CUT = (ShutdownStep.CUT_AND_INTERRUPT, limits.CUT_S)
_TERMINATE = (ShutdownStep.TERMINATE, limits.TERMINATE_S)
_KILL = (ShutdownStep.KILL, limits.KILL_S)
_MAKES_UNWIND = (ShutdownStep.INTERRUPT, ShutdownStep.CUT_AND_INTERRUPT, ShutdownStep.TERMINATE)


@dataclass(frozen=True, kw_only=True)
class ShutdownPolicy:
    """What is done to the workers of a call that does not go on.

    Attributes:
        on_stop: To one that is at work, when the user has stopped the call, or it took too long.
        on_failure: The same when another rank has failed.
        leaving: To one whose work is over, once no other is at work: a peer in a collective would
            see its connection break, and report an error that this shutdown has caused. Empty if
            workers stay.
    """

    on_stop: ShutdownSteps
    on_failure: ShutdownSteps
    leaving: ShutdownSteps = ()


END_WORKERS = ShutdownPolicy(
    on_stop=(_ASK, _INTERRUPT, _TERMINATE, _KILL),
    on_failure=((ShutdownStep.WAIT, limits.GRACE_END_S), _ASK, _INTERRUPT, _TERMINATE, _KILL),
    leaving=((ShutdownStep.LET_LEAVE, limits.EXIT_S + limits.UNWIND_S), _TERMINATE, _KILL),
)
KEEP_WORKERS = ShutdownPolicy(
    on_stop=(_ASK, _INTERRUPT, _CUT, _KILL),
    on_failure=(
        (ShutdownStep.WAIT, limits.GRACE_KEEP_S),
        _ASK,
        (ShutdownStep.CUT_AND_INTERRUPT, limits.ANSWER_S),
        _CUT,
        _KILL,
    ),
)
AFTER_LOSS: ShutdownSteps = ((ShutdownStep.ASK, limits.ASK_LAST_S), _KILL)
"""For the workers of a pool when one was lost: none can go on without it."""


class _Course:
    """Which steps one worker has been through, and when the next is due."""

    def __init__(self, member: WorkerHandle, steps: ShutdownSteps, due_at: float) -> None:
        self.member = member
        self.left = deque(steps)
        self.due_at = due_at
        self.step = ShutdownStep.WAIT
        self.has_answered = False
        self.has_unwound = False
        self.is_given_up = False

    def advance(self) -> None:
        """Take the steps that are due."""
        while not self.is_given_up and time.monotonic() >= self.due_at:
            # One that is still being forked hears no signal: an interrupt might even wake what
            # hangs in it.
            while self.left and self._is_unborn() and self.left[0][0] in _MAKES_UNWIND:
                self.left.popleft()
            if not self.left:
                self.is_given_up = True
                return
            self.step, seconds = self.left.popleft()
            if not self._act():
                # No time for an answer that cannot come: this worker cannot be asked.
                seconds = 0.0
            self.due_at = time.monotonic() + seconds

    def _is_unborn(self) -> bool:
        return self.member.state is HandleState.FORKED

    def _act(self) -> bool:
        """Carry the step out; returns whether it can have an effect."""
        match self.step:
            case ShutdownStep.ASK:
                return self.member.ask_where()
            case ShutdownStep.INTERRUPT:
                self.member.interrupt()
            case ShutdownStep.CUT_AND_INTERRUPT:
                self.member.cut_connections()
                self.member.interrupt()
            case ShutdownStep.TERMINATE:
                self.member.terminate()
            case ShutdownStep.KILL:
                self.member.kill()
            case ShutdownStep.LET_LEAVE:
                self.member.let_exit()
                # A stopped process (SIGSTOP) would not read the message.
                self.member.wake()
        return True

    def hurry(self) -> None:
        """Let KILL be the next step, due at once."""
        while self.left and self.left[0][0] is not ShutdownStep.KILL:
            self.left.popleft()
        if self.left:
            self.due_at = 0.0  # the monotonic clock is always beyond it


class ShutdownLadder:
    """Makes workers give up, step by step.

    Attributes:
        began: When it began (CLOCK_MONOTONIC).
        has_cut: Whether connections were cut, so that the process groups are unusable.
    """

    def __init__(
        self,
        members: Iterable[WorkerHandle],
        steps: ShutdownSteps,
        *,
        finished: Iterable[WorkerHandle] = (),
        leaving: ShutdownSteps = (),
    ) -> None:
        self.began = time.monotonic()
        self.has_cut = False
        self._courses = {member.rank: _Course(member, steps, self.began) for member in members}
        self._finished = {member.rank: member for member in finished}
        self._leaving = leaving

    # ---- events

    def answered(self, member: WorkerHandle) -> None:
        """This worker has said where it is. Once all have, waiting for answers ends."""
        asked = {c.member.rank: c for c in self._courses.values() if c.step is ShutdownStep.ASK}
        if member.rank in asked:
            asked[member.rank].has_answered = True
        if all(course.has_answered for course in asked.values()):
            for course in asked.values():
                course.due_at = 0.0

    def unwinds(self, member: WorkerHandle) -> None:
        """This worker has raised KeyboardInterrupt: let its `finally` blocks run, once."""
        course = self._courses.get(member.rank)
        if course is not None and not course.has_unwound and course.step in _MAKES_UNWIND:
            # Once only: a `finally` block that is interrupted again must not prolong it for ever.
            course.has_unwound = True
            course.due_at = time.monotonic() + limits.UNWIND_S

    def finished(self, member: WorkerHandle) -> None:
        """This worker's work is over."""
        # Without `leaving` steps workers stay, so nothing is left to do to them.
        if self._courses.pop(member.rank, None) is not None and self._leaving:
            self._finished[member.rank] = member

    def ended(self, member: WorkerHandle) -> None:
        """This worker is gone."""
        self._courses.pop(member.rank, None)
        self._finished.pop(member.rank, None)

    def hurry(self) -> None:
        """Skip all steps before KILL, which is then taken at the next `advance`."""
        for course in self._courses.values():
            course.hurry()

    # ---- time

    def due(self) -> float | None:
        """When `advance` has something to do (CLOCK_MONOTONIC); None if nothing is left to do."""
        return min((c.due_at for c in self._courses.values() if not c.is_given_up), default=None)

    def advance(self) -> None:
        """Do what is due."""
        # Also true when no course is left: then those whose work is over may leave.
        if all(course.is_given_up for course in self._courses.values()):
            now = time.monotonic()
            for rank, member in self._finished.items():
                self._courses[rank] = _Course(member, self._leaving, now)
            self._finished.clear()
        for course in self._courses.values():
            course.advance()
            self.has_cut |= course.step is ShutdownStep.CUT_AND_INTERRUPT


class ExitBarrier:
    """Lets workers that have returned exit, at the right time. See [Note: exit barrier]."""

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self._members = members
        self._next_look: float | None = None
        """When ranks at work are looked at; None if no rank waits to leave."""
        self._are_asked = False
        self._released: set[int] = set()
        self._overdue_at: float | None = None
        """When those that may leave must have left."""

    def note_return(self) -> None:
        """A worker has returned."""
        if self._next_look is None:
            self._next_look = time.monotonic() + limits.EXIT_RECHECK_S

    def due(self) -> float | None:
        """When something is to be done (CLOCK_MONOTONIC); None if there is nothing to decide."""
        if self._at_work():
            return self._next_look
        if self._waiting():
            # No rank is at work any more: those that wait may leave at once.
            return 0.0
        return self._overdue_at

    def advance(self) -> bool:
        """Do what is due. Returns whether workers that may leave and have not must be ended.

        They have handed over all they had. One that does not leave (stopped by a signal, or stuck
        in a library's clean-up), or whose end is not reported, must not keep the notebook waiting.
        """
        now = time.monotonic()
        due_at = self.due()
        if due_at is None or now < due_at:
            return False
        busy = self._at_work()
        waiting = self._waiting()
        if not busy and not waiting:
            return True
        if busy and not self._are_asked:
            for member in busy:
                # Or the old dump would be taken for the answer.
                member.stack_text = ""
                member.ask_stack()
            self._are_asked = True
            self._next_look = now + limits.ANSWER_S
            return False
        self._are_asked = False
        self._next_look = now + limits.EXIT_RECHECK_S
        # A rank that sets up a group may still need the connections of one that has returned.
        if waiting and not any(map(_sets_up, busy)):
            self._next_look = None
            self._overdue_at = self._overdue_at or now + limits.EXIT_S
            for member in waiting:
                self._released.add(member.rank)
                member.let_exit()
        return False

    def _at_work(self) -> list[WorkerHandle]:
        return [member for member in self._members if member.is_busy]

    def _waiting(self) -> list[WorkerHandle]:
        """Workers that have returned and may not leave yet."""
        return [
            member
            for member in self._members
            if member.state is HandleState.RETURNED and member.rank not in self._released
        ]


def _sets_up(member: WorkerHandle) -> bool:
    """Whether it sets up a process group, or itself."""
    return member.state is not HandleState.RUNNING or any(
        frame.function in _CONNECTING_FUNCTIONS for frame in member.stack
    )
