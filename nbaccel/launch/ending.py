"""Bringing workers to an end: politely, then firmly, always within bounds.

    ask for the stack ─► SIGINT ─► SIGTERM ─► SIGKILL ─► give up
    (where is it?)       a worker that answers "unwinding" gets time for its `finally` blocks;
                         one stuck in C code does not answer and is not waited for

A worker that cannot be killed sits in a driver. The notebook must not hang with it, so the last
wait is bounded too.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nbaccel.launch import wire
from nbaccel.launch.member import Member, State
from nbaccel.launch.reaping import end_group
from nbaccel.launch.starter import Starter
from nbaccel.launch.worker import STACK_SIGNAL

GRACE_S = 0.25
"""After a first failure: how long the other ranks get to fail by themselves."""
_STACK_S = 0.05
_ANSWER_S = 0.2
_UNWIND_S = 3.0
_TERM_S = 0.1
_KILL_S = 5.0


class Step(enum.Enum):
    """What was last done to a worker."""

    WAIT = 0
    STACK = 1
    INTERRUPT = 2
    TERMINATE = 3
    KILL = 4
    GIVEN_UP = 5


@dataclass
class _Course:
    step: Step
    until: float
    dismissed: bool = False
    """It was done, and has been told that it may leave."""


class Ending:
    """The end of all workers, begun for one reason.

    Args:
        members: Those to end.
        grace_s: Seconds before anything is done to them.
    """

    def __init__(self, members: Iterable[Member], *, grace_s: float) -> None:
        self.began = time.monotonic()
        self._courses = {
            id(m): _Course(Step.WAIT, self.began + grace_s) for m in members if not m.has_ended
        }

    def hurry(self) -> None:
        """No more patience: kill at the next `advance`."""
        for course in self._courses.values():
            if course.step.value < Step.KILL.value:
                course.step, course.until = Step.TERMINATE, 0.0

    def advance(self, members: Iterable[Member]) -> float | None:
        """Do what is due; returns when to call again (CLOCK_MONOTONIC), None if nothing is left."""
        left = [(m, self._courses[id(m)]) for m in members if not m.has_ended]
        left = [(m, course) for m, course in left if course.step is not Step.GIVEN_UP]
        # Those that are done go last: a peer in a collective would see its connection break, and
        # complain at length about something that we are doing.
        busy = [(m, course) for m, course in left if m.is_busy]
        for member, course in busy or left:
            now = time.monotonic()
            if not busy and not course.dismissed:
                course.step, course.until = Step.INTERRUPT, now + _dismiss(member)
                course.dismissed = True
            while course.step is not Step.GIVEN_UP and now >= course.until:
                self._next(course, member, now)
        return min((course.until for _, course in busy or left), default=None)

    def extend(self, member: Member) -> None:
        """This worker has answered the interrupt: let it unwind."""
        course = self._courses.get(id(member))
        if course is not None and course.step is Step.INTERRUPT:
            course.until = time.monotonic() + _UNWIND_S

    def _next(self, course: _Course, member: Member, now: float) -> None:
        course.step = Step(course.step.value + 1)
        course.until = now + self._act(course.step, member)

    def _act(self, step: Step, member: Member) -> float:
        """Carry a step out; returns how many seconds it gets to have an effect."""
        if step is Step.STACK:
            asking = member.is_busy and member.tells_its_stack
            if asking:
                send(member, STACK_SIGNAL)
            return _STACK_S if asking else 0.0
        member.told = member.told or member.is_busy
        if member.state is State.BORN:  # it has no handlers yet: an interrupt might even wake it
            end_group(member.pid)
            return _KILL_S
        if step is Step.INTERRUPT:
            interrupt(member)
            return _ANSWER_S
        if step is Step.TERMINATE:
            send(member, signal.SIGTERM)
            return _TERM_S
        if step is Step.KILL:
            end_group(member.pid)
            return _KILL_S
        return 0.0


def _dismiss(member: Member) -> float:
    """Let a worker leave that is done; returns how many seconds it gets to do so."""
    with contextlib.suppress(OSError):  # it has gone by itself
        member.channel.send(wire.Leave())
    send(member, signal.SIGCONT)
    return _UNWIND_S


def interrupt(member: Member) -> None:
    """Let a worker raise KeyboardInterrupt; one that somebody has stopped (SIGSTOP) goes on."""
    send(member, signal.SIGINT)
    send(member, signal.SIGCONT)


def send(member: Member, signum: int) -> None:
    """Send a signal to a worker that may have gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(member.pid, signum)


def kill_all(starter: Starter, members: Iterable[Member]) -> None:
    """End workers now and wait, within bounds, until they are reaped."""
    left = {m.pid: m for m in members}
    for pid in left:
        end_group(pid)
    deadline = time.monotonic() + _KILL_S
    while left and time.monotonic() < deadline:
        select.select(list(starter.sentinels()), [], [], deadline - time.monotonic())
        for ended in starter.collect():
            member = left.pop(ended.pid, None)
            if member is not None:
                member.state = State.GONE
