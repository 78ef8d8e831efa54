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

_KILL_STEP = (ShutdownStep.KILL, limits.KILL_S)
_TERMINATE_STEP = (ShutdownStep.TERMINATE, limits.TERMINATE_S)
_ASK_STEP = (ShutdownStep.ASK, limits.ASK_S)
_INTERRUPT_STEP = (ShutdownStep.INTERRUPT, limits.ANSWER_S)
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
    on_stop=(_ASK_STEP, _INTERRUPT_STEP, _TERMINATE_STEP, _KILL_STEP),
    on_failure=(
        (ShutdownStep.WAIT, limits.GRACE_END_S),
        _ASK_STEP,
        _INTERRUPT_STEP,
        _TERMINATE_STEP,
        _KILL_STEP,
    ),
    leaving=(
        (ShutdownStep.LET_LEAVE, limits.EXIT_S + limits.UNWIND_S),
        _TERMINATE_STEP,
        _KILL_STEP,
    ),
)
KEEP_WORKERS = ShutdownPolicy(
    on_stop=(
        _ASK_STEP,
        _INTERRUPT_STEP,
        (ShutdownStep.CUT_AND_INTERRUPT, limits.CUT_S),
        _KILL_STEP,
    ),
    on_failure=(
        (ShutdownStep.WAIT, limits.GRACE_KEEP_S),
        _ASK_STEP,
        (ShutdownStep.CUT_AND_INTERRUPT, limits.ANSWER_S),
        (ShutdownStep.CUT_AND_INTERRUPT, limits.CUT_S),
        _KILL_STEP,
    ),
)
AFTER_LOSS: ShutdownSteps = ((ShutdownStep.ASK, limits.ASK_LAST_S), _KILL_STEP)
"""For the workers of a pool when one was lost: none can go on without it."""


@dataclass(kw_only=True)
class _ShutdownCourse:
    """Which steps one worker has been through."""

    member: WorkerHandle
    left: deque[tuple[ShutdownStep, float]]
    until: float
    """When the next step is due."""
    step: ShutdownStep = ShutdownStep.WAIT
    """The latest one."""
    has_answered: bool = False
    has_unwound: bool = False
    """It has had its time to unwind."""
    is_given_up: bool = False

    def take_next(self) -> tuple[ShutdownStep, float]:
        next_step, step_seconds = self.left.popleft()
        is_listening = self.member.state is not HandleState.FORKED
        while not is_listening and next_step in _MAKES_UNWIND:
            # An interrupt might even wake what hangs in it.
            next_step, step_seconds = self.left.popleft()
        return next_step, step_seconds

    def hurry(self) -> None:
        while self.left and self.left[0][0] is not ShutdownStep.KILL:
            self.left.popleft()
        if self.left:
            # Due at once: the monotonic clock is always beyond 0.
            self.until = 0.0


class ShutdownLadder:
    """Makes workers give up, step by step."""

    def __init__(
        self,
        members: Iterable[WorkerHandle],
        steps: ShutdownSteps,
        *,
        finished: Iterable[WorkerHandle] = (),
        leaving: ShutdownSteps = (),
    ) -> None:
        self.began = time.monotonic()
        self._courses = {member.rank: _begun(member, steps, self.began) for member in members}
        self._finished = {member.rank: member for member in finished}
        self._leaving = leaving
        self.has_cut = False
        """Whether connections were cut, so that the process groups are unusable."""

    # ---- events

    def answered(self, member: WorkerHandle) -> None:
        """This worker has said where it is. Once all have, waiting for answers ends."""
        members = {
            rank: member_course
            for rank, member_course in self._courses.items()
            if member_course.step is ShutdownStep.ASK
        }
        if member.rank in members:
            members[member.rank].has_answered = True
        if all(member_course.has_answered for member_course in members.values()):
            for member_course in members.values():
                member_course.until = 0.0

    def unwinds(self, member: WorkerHandle) -> None:
        """This worker has raised KeyboardInterrupt: let its `finally` blocks run, once."""
        member_course = self._courses.get(member.rank)
        if (
            member_course is not None
            and not member_course.has_unwound
            and member_course.step in _MAKES_UNWIND
        ):
            # Once only: a `finally` block that is interrupted again must not prolong it for ever.
            member_course.has_unwound = True
            member_course.until = time.monotonic() + limits.UNWIND_S

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
        for member_course in self._courses.values():
            member_course.hurry()

    # ---- time

    def due(self) -> float | None:
        """When `advance` has something to do (CLOCK_MONOTONIC); None if nothing is left to do."""
        return min(
            (
                member_course.until
                for member_course in self._courses.values()
                if not member_course.is_given_up
            ),
            default=None,
        )

    def advance(self) -> None:
        """Do what is due."""
        # Also true when no course is left: then those whose work is over may leave.
        if all(member_course.is_given_up for member_course in self._courses.values()):
            current_time = time.monotonic()
            for rank, member in self._finished.items():
                self._courses[rank] = _begun(member, self._leaving, current_time)
            self._finished.clear()
        for member_course in self._courses.values():
            while not member_course.is_given_up and time.monotonic() >= member_course.until:
                self._take_step(member_course)

    def _take_step(self, member_course: _ShutdownCourse) -> None:
        if not member_course.left:
            member_course.is_given_up = True
            return
        member_course.step, step_seconds = member_course.take_next()
        if not self._act(member_course.step, member_course.member):
            # No time for an answer that cannot come: this worker cannot be asked.
            step_seconds = 0.0
        member_course.until = time.monotonic() + step_seconds

    def _act(self, next_step: ShutdownStep, member: WorkerHandle) -> bool:
        """Carry a step out; returns whether it can have an effect."""
        if next_step is ShutdownStep.ASK:
            return member.ask_where()
        if next_step is ShutdownStep.CUT_AND_INTERRUPT:
            self.has_cut = True
            member.cut_connections()
        if next_step in (ShutdownStep.INTERRUPT, ShutdownStep.CUT_AND_INTERRUPT):
            member.interrupt()
        elif next_step is ShutdownStep.TERMINATE:
            member.terminate()
        elif next_step is ShutdownStep.KILL:
            member.kill()
        elif next_step is ShutdownStep.LET_LEAVE:
            member.let_exit()
            # A stopped process (SIGSTOP) would not read the message.
            member.wake()
        return True


def _begun(
    member: WorkerHandle, steps: Sequence[tuple[ShutdownStep, float]], current_time: float
) -> _ShutdownCourse:
    return _ShutdownCourse(member=member, left=deque(steps), until=current_time)


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
            self._next_poll = time.monotonic() + limits.EXIT_RECHECK_S

    def due(self) -> float | None:
        """When something is to be done (CLOCK_MONOTONIC); None if there is nothing to decide."""
        if self._at_work():
            return self._next_poll
        if self._waiting():
            # No rank is at work any more: those that wait may leave at once.
            return 0.0
        return None if self._released_at is None else self._released_at + limits.EXIT_S

    def is_overdue(self) -> bool:
        """Whether workers that may leave and have not must be ended; not while one is at work.

        They have handed over all they had. One that does not leave (stopped by a signal, or stuck
        in a library's clean-up), or whose end is not reported, must not keep the notebook waiting.
        """
        if self._released_at is None or self._waiting() or self._at_work():
            return False
        return time.monotonic() >= self._released_at + limits.EXIT_S

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
                member.stack_text = ""
                member.ask_stack()
            self._are_asked = True
            self._next_poll = current_time + limits.ANSWER_S
        else:
            self._are_asked = False
            self._next_poll = current_time + limits.EXIT_RECHECK_S
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
