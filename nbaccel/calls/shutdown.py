"""Making workers give up their call, by steps of growing force.

                     launch (workers end)            pool (workers stay)
    finish the step  a call that trains is stopped where a step ends, the same one on all ranks
    ask where it is  stack, by signal                ASK_WHEREABOUTS, to its second thread
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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbaccel.workers import messaging, time_limits as limits
from nbaccel.workers.worker_processes import HandleState, WorkerHandle


class ShutdownStep(enum.Enum):
    """What can be done to a worker."""

    WAIT = enum.auto()
    FINISH_STEP = enum.auto()
    ASK = enum.auto()
    INTERRUPT = enum.auto()
    CUT_AND_INTERRUPT = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()


ShutdownSteps = tuple[tuple[ShutdownStep, float], ...]
"""What is done one after the other, each with the seconds that it gets to have an effect."""

_ASK = (ShutdownStep.ASK, limits.ASK_S)
_INTERRUPT = (ShutdownStep.INTERRUPT, limits.ANSWER_S)
_CUT = (ShutdownStep.CUT_AND_INTERRUPT, limits.CUT_S)
_TERMINATE = (ShutdownStep.TERMINATE, limits.TERMINATE_S)
_KILL = (ShutdownStep.KILL, limits.KILL_S)
_NEVER = float("inf")
_MAKES_UNWIND = (ShutdownStep.INTERRUPT, ShutdownStep.CUT_AND_INTERRUPT, ShutdownStep.TERMINATE)


class ShutdownPolicy(NamedTuple):
    """What is done to the workers of a call that does not go on, which are at work."""

    on_stop: ShutdownSteps  # when the user has stopped the call, or it took too long
    on_failure: ShutdownSteps  # when another rank has failed


END_WORKERS = ShutdownPolicy(
    on_stop=(_ASK, _INTERRUPT, _TERMINATE, _KILL),
    on_failure=((ShutdownStep.WAIT, limits.GRACE_END_S), _ASK, _INTERRUPT, _TERMINATE, _KILL),
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
OVERDUE: ShutdownSteps = (_TERMINATE, _KILL)  # for a launch's workers that were let go and stay


@dataclass
class _Course:
    """Which steps one worker has been through, and when the next is due."""

    member: WorkerHandle
    left: deque[tuple[ShutdownStep, float]]
    due_at: float
    step: ShutdownStep = ShutdownStep.WAIT
    has_answered: bool = False
    has_unwound: bool = False

    def advance(self) -> None:
        """Take the steps that are due."""
        while time.monotonic() >= self.due_at:
            # One still being forked hears no signal: an interrupt might wake what hangs in it.
            is_unborn = self.member.state is HandleState.FORKED
            while self.left and is_unborn and self.left[0][0] in _MAKES_UNWIND:
                self.left.popleft()
            if not self.left:
                self.due_at = _NEVER
                return
            self.step, seconds = self.left.popleft()
            match self.step:
                case ShutdownStep.ASK:
                    if not self.member.ask_where():
                        # No time for an answer that cannot come: this worker cannot be asked.
                        seconds = 0.0
                case ShutdownStep.INTERRUPT:
                    self.member.interrupt()
                case ShutdownStep.CUT_AND_INTERRUPT:
                    self.member.tell(messaging.Word.BREAK)
                    self.member.interrupt()
                case ShutdownStep.TERMINATE:
                    self.member.terminate()
                case ShutdownStep.KILL:
                    self.member.kill()
            self.due_at = time.monotonic() + seconds


class ShutdownLadder:
    """Makes workers give up, step by step."""

    def __init__(self, members: Iterable[WorkerHandle], steps: ShutdownSteps) -> None:
        self.began = time.monotonic()
        self.has_cut = False  # if so, the process groups are unusable
        self._courses = {one.rank: _Course(one, deque(steps), self.began) for one in members}

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
        if course is None:
            return
        if course.step is ShutdownStep.FINISH_STEP:
            # It hands its weights over then.
            course.due_at = time.monotonic() + limits.MOST_STEP_S
        elif not course.has_unwound and course.step in _MAKES_UNWIND:
            # Once only: a `finally` block that is interrupted again must not prolong it for ever.
            course.has_unwound = True
            course.due_at = time.monotonic() + limits.UNWIND_S

    def answers_step(self, seconds: float) -> None:
        """A worker has said which step it is at: let the end of a step take so long from now on."""
        latest = self.began + limits.MOST_STEP_S
        for course in self._courses.values():
            if course.step is ShutdownStep.FINISH_STEP:
                due_at = min(time.monotonic() + seconds, latest)
                course.due_at = max(course.due_at, due_at)

    def finished(self, member: WorkerHandle) -> None:
        """This worker's work is over, or it is gone."""
        self._courses.pop(member.rank, None)

    def hurry(self) -> None:
        """Skip all steps before KILL, which is then taken at the next `advance`."""
        for course in self._courses.values():
            while course.left and course.left[0][0] is not ShutdownStep.KILL:
                course.left.popleft()
            if course.left:
                course.due_at = 0.0  # the monotonic clock is always beyond it

    @property
    def is_over(self) -> bool:
        """Whether all have given up their call."""
        return not self._courses

    def due(self) -> float | None:
        """When `advance` has something to do (CLOCK_MONOTONIC); None if nothing is left to do."""
        due_at = min((course.due_at for course in self._courses.values()), default=_NEVER)
        return None if due_at == _NEVER else due_at

    def advance(self) -> None:
        """Do what is due."""
        for course in self._courses.values():
            course.advance()
            self.has_cut |= course.step is ShutdownStep.CUT_AND_INTERRUPT


class StepAgreement:
    """Lets all ranks stop where the same step ends; see `workers.step_stop`."""

    def __init__(self, members: Iterable[WorkerHandle], wait_s: float) -> None:
        self.wait_s = wait_s  # how long a step may take from each answer on
        self._members = {member.rank: member for member in members}
        self._reached: dict[int, int] = {}
        self._goal = messaging.GoOnTo(0)
        self._ahead = 1
        self._tell(messaging.Word.STOP_AT_STEP)

    def answered(self, rank: int, number: int) -> None:
        """This rank has reached so many boundaries."""
        self._reached[rank] = number
        if self._reached.keys() != self._members.keys() or self._goal.is_agreed:
            return
        furthest = max(self._reached.values())
        self._reached.clear()
        if furthest < self._goal.number:
            self._goal = messaging.GoOnTo(self._goal.number, is_agreed=True)
        else:
            self._goal = messaging.GoOnTo(furthest + self._ahead)
            # Short steps: that far ahead a rank may have come by the time it hears of it.
            self._ahead *= 4
        self._tell(self._goal)

    def call_off(self) -> None:
        """A rank has ended by itself: none is stopped at a step."""
        if not self._goal.is_agreed:
            self._goal = messaging.GoOnTo(float("inf"), is_agreed=True)
            self._tell(self._goal)

    def _tell(self, message: Any) -> None:
        for member in self._members.values():
            member.tell(message)
