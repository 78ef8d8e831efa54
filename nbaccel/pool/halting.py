"""Letting workers give a cell up without losing them.

look ─► interrupt ─► cut and interrupt again ─► kill
(where  (KeyboardInterrupt; one that     (a wait in C++    (deaf to all of it: then the
is it?) unwinds gets time for `finally`)  ends by that)     pool is lost, and says so)
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nbaccel.launch.ending import interrupt
from nbaccel.launch.member import Member
from nbaccel.launch.reaping import end_group
from nbaccel.pool import messages

__all__ = ["GRACE_S", "Halting"]

GRACE_S = 0.1
"""After a first failure: how long the other ranks get to end by themselves."""
_LOOK_S = 0.05
_ANSWER_S = 0.25
_CUT_S = 1.0
_UNWIND_S = 3.0
_KILL_S = 5.0


class _Step(enum.Enum):
    WAIT = 0
    LOOK = 1
    INTERRUPT = 2
    CUT = 3
    KILL = 4
    GIVEN_UP = 5


@dataclass
class _Course:
    member: Member
    step: _Step
    until: float
    unwound: bool = False
    """It has had its time to unwind."""


class Halting:
    """The end of a turn for all workers that are still in it, begun for one reason.

    Args:
        members: Those that are.
        grace_s: Seconds before anything is done to them.
        at_once: Whether a collective can be cut with the first interrupt: when a peer is gone
            anyway, nobody will complete it.
    """

    def __init__(self, members: Iterable[Member], *, grace_s: float, at_once: bool) -> None:
        self.began = time.monotonic()
        self._at_once = at_once
        self._courses = {
            m.rank: _Course(m, _Step.WAIT, self.began + grace_s) for m in members if not m.has_ended
        }
        self.was_cut = False
        """Whether connections were cut: then the process groups are of no more use."""
        self.killed: list[int] = []
        """Ranks that were deaf to everything."""

    def over(self, rank: int) -> None:
        """This rank is through with the turn."""
        self._courses.pop(rank, None)

    def seen(self, rank: int) -> None:
        """This rank has said where it is: no need to wait for that any longer."""
        course = self._courses.get(rank)
        if course is not None and course.step is _Step.LOOK:
            course.until = 0.0

    def unwinding(self, rank: int) -> None:
        """This rank has raised KeyboardInterrupt: let its `finally` blocks run."""
        course = self._courses.get(rank)
        if course is not None and not course.unwound and course.step is not _Step.KILL:
            course.unwound = True
            course.until = time.monotonic() + _UNWIND_S

    def hurry(self) -> None:
        """No more patience: kill at the next `advance`."""
        for course in self._courses.values():
            if course.step.value < _Step.KILL.value:
                course.step, course.until = _Step.CUT, 0.0

    def advance(self) -> float | None:
        """Do what is due; returns when to call again (CLOCK_MONOTONIC), None if nothing is left."""
        for course in tuple(self._courses.values()):
            while time.monotonic() >= course.until and course.step is not _Step.GIVEN_UP:
                course.step = _Step(course.step.value + 1)
                course.until = time.monotonic() + self._act(course)
        left = (c.until for c in self._courses.values() if c.step is not _Step.GIVEN_UP)
        return min(left, default=None)

    def _act(self, course: _Course) -> float:
        """Carry a step out; returns how many seconds it gets to have an effect."""
        member = course.member
        if course.step is _Step.LOOK:
            tell(member, messages.Look())
            return _LOOK_S
        member.told = True
        if course.step is _Step.INTERRUPT:
            if self._at_once:
                self._cut(member)
            interrupt(member)
            return _ANSWER_S
        if course.step is _Step.CUT:
            self._cut(member)
            interrupt(member)
            return _CUT_S
        if course.step is _Step.KILL:
            self.killed.append(member.rank)
            end_group(member.pid)
            return _KILL_S
        return 0.0

    def _cut(self, member: Member) -> None:
        self.was_cut = True
        tell(member, messages.Break())


def tell(member: Member, message: messages.Look | messages.Break) -> None:
    """Say something to the second thread of a worker that may have gone already."""
    if member.control is not None:
        with contextlib.suppress(OSError):
            member.control.send(message)
