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


class Ending:
    """The end of all workers, begun for one reason.

    Args:
        members: Those to end.
        grace_s: Seconds before anything is done to them.
        ask_stacks: Whether to ask each where it is first.
    """

    def __init__(self, members: Iterable[Member], *, grace_s: float, ask_stacks: bool) -> None:
        self.began = time.monotonic()
        self._ask_stacks = ask_stacks
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
        due = []
        for member in members:
            course = self._courses.get(id(member))
            if member.has_ended or course is None or course.step is Step.GIVEN_UP:
                continue
            now = time.monotonic()
            if member.state in (State.RETURNED, State.FAILED) and course.step is Step.WAIT:
                course.until = max(course.until, self.began + _UNWIND_S)  # it is leaving by itself
            while now >= self._patience(course, member) and course.step is not Step.GIVEN_UP:
                self._next(course, member, now)
            if course.step is not Step.GIVEN_UP:
                due.append(self._patience(course, member))
        return min(due, default=None)

    def _patience(self, course: _Course, member: Member) -> float:
        if course.step is Step.INTERRUPT and (member.unwinding or not member.is_busy):
            return course.until - _ANSWER_S + _UNWIND_S
        return course.until

    def _next(self, course: _Course, member: Member, now: float) -> None:
        course.step = Step(course.step.value + 1)
        if course.step is Step.STACK:
            course.until = now + (_STACK_S if self._ask_stacks else 0.0)
            if self._ask_stacks and member.state is not State.BORN:
                send(member, STACK_SIGNAL)
            return
        if course.step is Step.GIVEN_UP:
            return
        member.told = True
        signum, wait = {
            Step.INTERRUPT: (signal.SIGINT, _ANSWER_S),
            Step.TERMINATE: (signal.SIGTERM, _TERM_S),
            Step.KILL: (signal.SIGKILL, _KILL_S),
        }[course.step]
        course.until = now + wait
        if signum == signal.SIGKILL:
            end_group(member.pid)
        else:
            send(member, signum)


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
