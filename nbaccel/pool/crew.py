"""The workers of a pool, from their start to their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbaccel.errors import LaunchInterrupted, StartupFailed
from nbaccel.launch import publish, store, system, verdict, wire, worker
from nbaccel.launch.console import Console
from nbaccel.launch.fork import ForkStarter
from nbaccel.launch.hiring import Surroundings, dismiss, hire, libraries_memory, posts, topologies
from nbaccel.launch.member import Member
from nbaccel.launch.packing import judge_fork
from nbaccel.launch.starter import Starter
from nbaccel.launch.template import TemplateStarter
from nbaccel.plan import Plan
from nbaccel.pool import messages
from nbaccel.pool.ending import CellFollowing
from nbaccel.pool.halting import tell
from nbaccel.pool.turn import Account, Turn

__all__ = ["Crew"]

_LOOK_S = 0.2

Tasks = Mapping[int, tuple[Any, Sequence[int]]]
"""Rank → a task's body, and the descriptors to send along."""


class Crew:
    """Workers that have been started together.

    Args:
        plan: What was planned.
        starter: Who has started them.
        members: They, by rank.
        sentinels: Rank → descriptor that becomes readable when that worker has ended.
    """

    def __init__(
        self, plan: Plan, starter: Starter, members: list[Member], sentinels: dict[int, int]
    ) -> None:
        self.plan = plan
        self.members = members
        self._starter = starter
        self._sentinels = sentinels
        self._numbers = itertools.count(1)
        self._oom_kills = system.oom_kills()
        self._orphaned = ""
        self._memory = contextlib.ExitStack()

    @classmethod
    def start(cls, plan: Plan) -> Crew:
        """Start the workers of a plan, and wait until they can take a task.

        Raises:
            PortTaken, UnsafeFork: Before any process is started.
            WorkerFailed: A worker could not take up its post; all have ended.
            LaunchInterrupted: The user stopped it; all have ended.
        """
        with contextlib.ExitStack() as stack:
            if plan.start_method == "fork":
                judge_fork()
            listener = store.listen(plan.master_addr, plan.port)
            stack.callback(listener.close)
            starter: Starter = (
                ForkStarter(worker.Inheritance())
                if plan.start_method == "fork"
                else TemplateStarter()
            )
            undo = stack.enter_context(contextlib.ExitStack())
            crew = cls(plan, starter, [], {})
            undo.callback(crew.end)
            places = topologies(plan, listener)
            crew._memory.enter_context(libraries_memory(places))
            for place in places:
                member = hire(starter, place.rank, crew.members)
                crew._sentinels[place.rank] = _sentinel(member.pid)
                if isinstance(starter, ForkStarter):
                    starter.ours.append(crew._sentinels[place.rank])
            tasks = posts(plan, places, Surroundings.here({}), listener)
            for (post, fds), member in zip(tasks, crew.members, strict=True):
                member.control, theirs = wire.Channel.pair()
                with contextlib.closing(theirs):
                    enlist = messages.Enlist(post=post, share_back=plan.config.share_back)
                    with wire.unless_gone():
                        member.channel.send(enlist, [*fds, theirs.fileno()])
            crew._see_them_in()
            undo.pop_all()
        return crew

    def _see_them_in(self) -> None:
        account = self._watch([m.rank for m in self.members], lambda: None, number=0)
        if account.interrupted:
            raise LaunchInterrupted(
                f"all {len(self.members)} workers have been ended at their start"
            )
        failed = verdict.error(account, world_size=self.plan.world_size, timeout_s=None)
        if failed is not None:
            raise failed

    def turn(
        self,
        tasks: Tasks,
        *,
        timeout_s: float | None = None,
        is_shown: bool = False,
    ) -> Account:
        """Give some workers a task each, and watch until all of them are through.

        Args:
            tasks: The tasks by rank.
            timeout_s: Seconds after which the turn is ended; None for no limit.
            is_shown: Whether a dashboard shows how the ranks get on.

        Returns:
            What became of it.
        """
        number = next(self._numbers)

        def begin() -> None:
            for rank, (body, fds) in tasks.items():
                # One that has gone meanwhile cannot take it: its sentinel tells, in the watch.
                with contextlib.suppress(OSError):
                    task = messages.Task(number=number, body=body)
                    self.members[rank].channel.send(task, fds)

        ranks = list(tasks)
        following = CellFollowing(ranks, device=self.plan.device) if is_shown else None
        return self._watch(ranks, begin, number=number, timeout_s=timeout_s, following=following)

    def everyone(self, body: Any, fds: Sequence[int] = ()) -> Account:
        """Give all workers the same task."""
        return self.turn({m.rank: (body, fds) for m in self.members})

    def post(self, body: Any) -> None:
        """Give all workers a task that nobody waits for; it is done before the next one."""
        for member in self.members:
            with contextlib.suppress(OSError):  # it has gone: the next turn tells
                member.channel.send(messages.Task(number=0, body=body))

    def look(self) -> dict[int, messages.Whereabouts]:
        """Ask all workers where they are; those that do not answer at once are left out."""
        found: dict[int, messages.Whereabouts] = {}
        waiting = {m.channel.fileno(): m for m in self.members if not m.hung_up}
        for member in waiting.values():
            tell(member, messages.Look())
        deadline = time.monotonic() + _LOOK_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd in select.select(list(waiting), [], [], left)[0]:
                try:
                    message, _ = waiting[fd].channel.receive()
                except EOFError:
                    del waiting[fd]  # it has ended; the next turn says why
                    continue
                if isinstance(message, messages.Whereabouts):
                    found[waiting.pop(fd).rank] = message
                elif isinstance(message, wire.Leaves):
                    waiting[fd].note(message)
                elif isinstance(message, (wire.Display, wire.ClearOutput)):
                    publish.show(message)  # of a thread that a cell has left behind
        return found

    def _watch(
        self, ranks: Sequence[int], begin: Callable[[], None], *, number: int, **more: Any
    ) -> Account:
        template = self.plan.config.log_line_prefix_template
        if template is None and len(self.members) == 1:
            template = ""  # there is nobody to tell it from
        console = Console([m.rank for m in self.members], template=template)
        for member in self.members:
            if member.rank not in ranks:
                console.close(member.rank)  # its twins do not wait for what it may say
        watch = Turn(
            self.members,
            ranks,
            number=number,
            console=console,
            collect=self._collect,
            oom_kills=self._oom_kills,
            **more,
        )
        account = watch.run(
            {m.rank: self._sentinels[m.rank] for m in self.members if not m.has_ended}, begin
        )
        account.remark = self._orphaned
        return account

    def _collect(self) -> Sequence[wire.Ended]:
        """Workers that have ended; all of them, if the process they came from has."""
        try:
            return self._starter.collect()
        except StartupFailed as error:
            self._orphaned = str(error).partition("\n")[0]
            status = getattr(self._starter, "status", None)
            left = [m.pid for m in self.members if not m.has_ended]
            because = f"ended: {self._orphaned[:1].lower()}{self._orphaned[1:].rstrip('.')}"
            return [wire.Ended(pid, status or 0, 0, because) for pid in left]

    def end(self) -> None:
        """End all workers, wait until they are reaped, and close every connection."""
        dismiss(self._starter, self.members)
        self._memory.close()
        self._starter.close()
        while self._sentinels:
            os.close(self._sentinels.popitem()[1])


def _sentinel(pid: int) -> int:
    """A descriptor that is readable once a worker has ended, which it may have already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        reading, writing = os.pipe()
        os.close(writing)
        return reading
