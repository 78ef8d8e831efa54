"""Where the ranks of a launch are that seem to wait: asked of those alone that do nothing.

A rank that has used no processor time for some seconds is asked for its stack, as it is when a
launch is ended (faulthandler writes it, without a hand of the worker's own code). One that computes
is never disturbed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from nbaccel.launch import failure
from nbaccel.launch.ending import send
from nbaccel.launch.member import Member, State
from nbaccel.launch.worker import STACK_SIGNAL

__all__ = ["Whereabouts"]

_IDLE_S = 3.0  # without processor time: then it waits for something
_AGAIN_S = 5.0  # until it is asked anew
_SHARE = 0.2  # of the time: threads of gloo and others use a little


@dataclass(slots=True)
class _Sight:
    """What was seen of one rank."""

    cpu_s: float
    at: float
    idle_since: float | None = None
    asked_at: float = float("-inf")
    is_asked: bool = False
    doing: str = ""


class Whereabouts:
    """Knows where ranks wait. One per launch."""

    def __init__(self) -> None:
        self._sights: dict[int, _Sight] = {}

    def doing(self, rank: int) -> str:
        """`waiting in barrier (Cell In[2], line 4)`; empty for one that is at work."""
        sight = self._sights.get(rank)
        return sight.doing if sight is not None else ""

    def look(self, members: Iterable[Member]) -> None:
        """Read what was answered, and ask those that do nothing; to be called about once a second.

        Args:
            members: The workers.
        """
        now = time.monotonic()
        for member in members:
            cpu_s = _cpu_seconds(member.pid) if _can_be_asked(member) else None
            if cpu_s is None:
                self._sights.pop(member.rank, None)
            else:
                sight = self._sights.setdefault(member.rank, _Sight(cpu_s, now))
                self._look_at(sight, member, cpu_s, now)

    def _look_at(self, sight: _Sight, member: Member, cpu_s: float, now: float) -> None:
        if sight.is_asked:
            sight.is_asked = False
            sight.doing = _take_answer(member) or sight.doing
        works = cpu_s - sight.cpu_s > _SHARE * (now - sight.at)
        sight.cpu_s, sight.at = cpu_s, now
        if works:
            sight.idle_since, sight.doing = None, ""
        elif sight.idle_since is None:
            sight.idle_since = now
        elif now - sight.idle_since >= _IDLE_S and now - sight.asked_at >= _AGAIN_S:
            sight.asked_at, sight.is_asked = now, True
            send(member, STACK_SIGNAL)


def _can_be_asked(member: Member) -> bool:
    return member.state is State.RUNNING and member.tells_its_stack and not member.told


def _take_answer(member: Member) -> str:
    """What it was doing, unless that is what it has died of: then its death is told of it."""
    if not member.stack_text or "Fatal Python error" in member.stack_text:
        return ""
    stack = member.stack()
    member.stack_text = ""
    return failure.doing(stack) if stack else ""


def _cpu_seconds(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None
