"""The workers of a launch or of a pool: started, given calls, asked where they are, and ended.

A launch's are given one call; a pool's stay, and are given one task after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nbaccel.base import frames, processes
from nbaccel.base.errors import LaunchInterrupted
from nbaccel.base.log import write_notice
from nbaccel.calls import outcome
from nbaccel.calls.status_table import rank_status
from nbaccel.calls.supervisor import CallResult, RankTasks, Supervisor
from nbaccel.config.capabilities import engine_row
from nbaccel.hosts.host_session import HostSession
from nbaccel.output import publish
from nbaccel.output.console import Console, RankLogs, hidden_streams
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus
from nbaccel.output.publish import CellPlace, WaitingLine
from nbaccel.plan import Plan
from nbaccel.plan.topology import Topology, remove_orphans, remove_shared_memory
from nbaccel.transfer import memfd
from nbaccel.workers import fork_safety, messaging, template, time_limits, worker
from nbaccel.workers.worker_processes import (
    ForkStarter,
    MeetingPlace,
    Starter,
    TemplateStarter,
    WorkerHandle,
    assignments,
    connect,
    places,
)


def open_hosts(
    clean_up: contextlib.ExitStack, plan: Plan, lost: Sequence[str] = ()
) -> HostSession | None:
    """Hosts for the workers, without those that were lost; None: here. `clean_up` lets them go."""
    if not engine_row(plan.engine).runs_on_hosts:
        return None
    session = HostSession(plan, lost)
    clean_up.callback(session.close)
    for warning in session.plan.warnings:
        write_notice(f"nbaccel: {warning}\n")
    return session


class Group:
    """Workers that are started together, given one call or, where it stays, task after task."""

    def __init__(self, plan: Plan, starter: Starter, *, stays: bool) -> None:
        self.plan = plan
        self.stays = stays
        self.members: list[WorkerHandle] = []
        self.oom_kills = processes.oom_kills()
        self.why_lost = ""  # why a pool's workers were all ended; empty while they are there
        self._starter = starter
        self._on_end = contextlib.ExitStack()
        # Before all others, so that it runs after them: workers are reaped through the starter.
        self._on_end.callback(starter.close)
        self._numbers = itertools.count()  # of tasks; a worker's first `Idle` has number 0
        self._rank_logs: RankLogs | None = None
        self._task: Supervisor | None = None

    @classmethod
    def started(
        cls,
        clean_up: contextlib.ExitStack,
        plan: Plan,
        session: HostSession | None,
        waiting_line: WaitingLine,
        *,
        forked_call: worker.WorkerCall | None = None,
        variables: Mapping[str, str] | None = None,
        stays: bool = False,
    ) -> Group:
        """Start the workers of a plan, set up while this returns; `clean_up` ends them."""
        if session is None:
            config = plan.config
            store_socket = None
            if config.node_rank == 0:
                store_socket = processes.listen(plan.master_addr, plan.port)
            place = MeetingPlace(
                address=plan.master_addr,
                port=store_socket.getsockname()[1] if store_socket is not None else plan.port or 0,
                store_socket=store_socket,
                node_rank=config.node_rank,
                num_nodes=config.num_nodes,
            )
            if plan.start_method == "fork":
                is_asked = forked_call is None or plan.config.start_method == "fork"
                starter: Starter = ForkStarter(forked_call, is_asked=is_asked)
            else:
                threads = plan.threads_per_process
                starter = TemplateStarter(plan.device, threads=threads, say=waiting_line.say)
        else:
            plan = session.plan
            place = session.bind_store(plan.port)
            starter = session.starter()
        close_store = place.store_socket.close if place.store_socket is not None else lambda: None
        clean_up.callback(close_store)
        plan = dataclasses.replace(plan, world_size=plan.num_processes * place.num_nodes)
        group = cls(plan, starter, stays=stays)
        clean_up.callback(group.end)
        group._start(place, variables or {})
        # Rank 0 has a copy. With this one open, connections to a dead rank 0 would not be refused.
        close_store()
        return group

    @classmethod
    def ready(cls, plan: Plan) -> tuple[Group, Callable[[], None]]:
        """Start a pool's workers, and wait until they can take a task; also what ends them."""
        if plan.start_method == "fork":
            fork_safety.judge_fork()
        waiting_line = WaitingLine(plan.num_processes)
        with contextlib.ExitStack() as undo_start, contextlib.closing(waiting_line):
            if template.uses_template(plan):
                pool_template = template.template_for(plan.device)
                # The cells to come may use anything that the notebook has.
                pool_template.wait(waiting_line.say, lambda _package: True)
                plan = pool_template.told_in(plan)
            session = open_hosts(undo_start, plan)
            group = cls.started(undo_start, plan, session, waiting_line, stays=True)
            result = group.run_tasks({}, ranks=[member.rank for member in group.members])
            if result.interrupted:
                raise LaunchInterrupted(f"all {len(group.members)} workers were ended at the start")
            if not result.is_complete:
                raise outcome.call_error(result, plan)
            # The start has succeeded: the group is the caller's to end.
            return group, undo_start.pop_all().close

    def _start(self, meeting_place: MeetingPlace, variables: Mapping[str, str]) -> None:
        """Start all workers and tell each its place; they then wait for a task."""
        worker_places = places(self.plan, self._starter.shares, meeting_place)
        if self.plan.config.log_dir is not None:
            ranks = [place.rank for place in worker_places]
            self._rank_logs = RankLogs(self.plan.config.log_dir, ranks)
            self._on_end.callback(self._rank_logs.close)
        # Shared memory that libraries make in workers: what is there before, and theirs.
        _forget_memory(worker_places)
        self._on_end.callback(_forget_memory, worker_places)
        # Before the first start: a failed start of one worker must end those started before it.
        self._on_end.callback(self._end_workers)
        told = assignments(
            self.plan,
            self._starter.shares,
            worker_places,
            meeting_place,
            variables,
            stays=self.stays,
            has_cells=publish.has_cells(),
        )
        # Each sets itself up while the next one is being forked.
        for assignment in told:
            member = self._start_worker(assignment.place.rank)
            fds = []
            if assignment.serves_store and meeting_place.store_socket is not None:
                fds.append(meeting_place.store_socket.fileno())
            # If it has died already, its sentinel says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.channel.send(assignment, fds)

    def _start_worker(self, rank: int) -> WorkerHandle:
        channel, pipes, worker_ends = connect()
        starter = self._starter
        with memfd.closing_files(*worker_ends):
            if isinstance(starter, ForkStarter):
                starter.ours += (channel.fileno(), *pipes)
            pid = starter.start(worker_ends)
        member = WorkerHandle(
            rank=rank,
            channel=starter.channel_to(pid, channel),
            pipes=pipes,
            pid=pid,
            sentinel=starter.sentinel(pid),
            starter=starter,
            stays=self.stays,
        )
        # At once, so that it is ended whatever happens next.
        self.members.append(member)
        if isinstance(starter, ForkStarter):
            # A fork of the next worker would inherit this descriptor and keep it open.
            starter.ours.append(member.sentinel)
        return member

    def collect(self) -> Sequence[tuple[WorkerHandle, messaging.Ended]]:
        """Workers that have ended since the last call."""
        ends = [(member, self._starter.end_of(member.pid)) for member in self._living()]
        return [(member, ended) for member, ended in ends if ended is not None]

    def let_exit(self) -> None:
        """Let idle workers do what libraries do at the end of a process, before they are ended."""
        for member in self._living():
            member.let_exit()
        self._wait_for_ends(time_limits.UNWIND_S)

    def end(self) -> None:
        """End what is left of the workers, wait until they are reaped, close all connections."""
        self._on_end.close()

    def _end_workers(self) -> None:
        for member in self._living():
            member.kill()
        # With a limit: a process that hangs in a driver cannot be killed.
        self._wait_for_ends(time_limits.KILL_S)
        for member in self.members:
            for folders in member.leftovers:
                folders.remove()
            member.close()

    def _living(self) -> list[WorkerHandle]:
        return [member for member in self.members if not member.has_ended]

    def _wait_for_ends(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while (living := self._living()) and (left_s := deadline - time.monotonic()) > 0:
            messaging.wait([member.sentinel for member in living], left_s)
            for member, _ in self.collect():
                member.end()

    def run_tasks(
        self,
        tasks: RankTasks,
        *,
        ranks: Collection[int] | None = None,
        timeout_s: float | None = None,
        place: CellPlace | None = None,
        title: str = "",
        waiting_line: WaitingLine | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> CallResult:
        """Give workers a task each, and watch until all of them, or `ranks`, have finished."""
        make_show = None
        if place is not None:
            # Not where output goes to a file or another program.
            is_watched = frames.running_shell() is not None or sys.stderr.isatty()
            make_show = functools.partial(
                Dashboard,
                list(tasks),
                plan=self.plan,
                title=title,
                place=place,
                is_wanted=self.stays or is_watched,
                of_pool=self.stays,
                waiting_line=waiting_line,
                on_poll=on_poll,
            )
        ranks = ranks or tasks
        member_ranks = [member.rank for member in self.members]
        prefix = self.plan.config.log_line_prefix_template
        if prefix is None and self.stays and len(member_ranks) == 1:
            # A single worker needs no prefix to tell its lines from others.
            prefix = ""
        shown = self.plan.config.shown_output
        console = Console(
            member_ranks,
            prefix_template=prefix,
            hidden=hidden_streams(shown, member_ranks) if shown is not None else frozenset(),
            rank_logs=self._rank_logs,
            place=place,
        )
        for rank in member_ranks:
            if rank not in ranks:
                # Equal lines of ranks are joined; ranks with the task must not wait for this one.
                console.close(rank)
        self._task = Supervisor(
            self,
            ranks,
            tasks,
            task_number=next(self._numbers),
            console=console,
            timeout_s=timeout_s,
            make_show=make_show,
        )
        try:
            result = self._task.run()
        finally:
            self._task = None
        if result.lost:
            self.why_lost = outcome.why_lost(result)
        return result

    def everyone(self, body: Any, fds: Sequence[int] = ()) -> CallResult:
        """Give all workers the same task."""
        return self.run_tasks({member.rank: (body, fds) for member in self.members})

    def rank_rows(self) -> list[RankStatus]:
        """How each worker stands, by what it has told last; none is asked."""
        open_ranks = frozenset() if self._task is None else self._task.open
        # Processes that are gone, though no task has noticed it yet.
        ended = messaging.wait([member.sentinel for member in self._living()], 0.0)
        return [
            rank_status(member, is_open=member.rank in open_ranks, is_gone=member.sentinel in ended)
            for member in self.members
        ]


def _forget_memory(worker_places: Sequence[Topology]) -> None:
    remove_shared_memory(worker_places)
    remove_orphans()
