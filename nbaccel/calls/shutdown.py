"""Making workers give up their call, by steps of growing force, each with a time limit.

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
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbaccel.workers import time_limits as limits
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = ["AFTER_LOSS", "END_WORKERS", "KEEP_WORKERS", "ShutdownLadder", "ShutdownPolicy"]


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
