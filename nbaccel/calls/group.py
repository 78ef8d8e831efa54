"""The workers of a launch or of a pool: started, given calls, asked where they are, and let go.

A launch's are given one call; a pool's stay, and are given one task after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nbaccel.base.errors import LaunchInterrupted, StartupFailed
from nbaccel.base.ports import listen
from nbaccel.calls import outcome
from nbaccel.calls.launch_hosts import LaunchHosts
from nbaccel.calls.message_texts import why_lost
from nbaccel.calls.outcome import CallResult
from nbaccel.calls.packing import judge_fork
from nbaccel.calls.status_table import RankStatus, rank_status
from nbaccel.calls.supervisor import RankTasks, Supervisor
from nbaccel.output import publish
from nbaccel.output.cell_place import CellPlace, WaitingLine
from nbaccel.output.console import Console
from nbaccel.output.panel.following import DashboardUpdater
from nbaccel.output.rank_logs import RankLogs, hidden_streams, logs_of_run
from nbaccel.plan import Plan
from nbaccel.workers import messaging, template, time_limits, worker
from nbaccel.workers.fork import ForkStarter
from nbaccel.workers.start_method import Starter
from nbaccel.workers.template_starter import TemplateStarter
from nbaccel.workers.worker_group import MeetingPlace, WorkerGroup
from nbaccel.workers.worker_handle import WorkerHandle

__all__ = ["Group"]


class Group(WorkerGroup):
    """Workers that are started together, and watched while they do what they are given.

    Attributes:
        why_lost: Why a pool's workers were all ended in a task; empty while they are there.
    """

    def __init__(self, plan: Plan, worker_starter: Starter, **options: Any) -> None:
        super().__init__(plan, worker_starter, **options)
        self._sentinels: dict[int, int] = {}
        """Rank → descriptor that becomes readable when that worker has ended; of a pool's alone.
        The template's report of that may be read by a launch that runs between two tasks."""
        self.why_lost = ""
        self._numbers = itertools.count()
        """Of tasks. A worker's first `Idle` has the number 0: that of its start."""
        self._on_end.callback(self._close_sentinels)
        self._rank_logs: RankLogs | None = None
        self._task: Supervisor | None = None
        self._answers: dict[int, messaging.Whereabouts] = {}
        """What each worker has answered last while it was idle."""

    @classmethod
    def started(
        cls,
        clean_up: contextlib.ExitStack,
        hosts: LaunchHosts,
        waiting_line: WaitingLine,
        *,
        forked_call: worker.WorkerCall | None = None,
        variables: Mapping[str, str] | None = None,
        stays: bool = False,
    ) -> Group:
        """Start the workers of a plan, which are set up while this returns.

        `clean_up` ends them, also if the start fails. Workers that are forked from this process for
        a call are given it as `forked_call`.
        """
        session = hosts.session()
        if session is None:
            plan = hosts.plan
            place = _meeting_place(plan)
            starter = _local_starter(plan, waiting_line, forked_call)
        else:
            plan = session.plan
            place = session.bind_store(plan.port)
            starter = session.starter()
        close_store = place.store_socket.close if place.store_socket is not None else lambda: None
        clean_up.callback(close_store)
        plan = dataclasses.replace(plan, world_size=plan.num_processes * place.num_nodes)
        group = cls(plan, starter, stays=stays, after_end=hosts.close if stays else close_store)
        clean_up.callback(group.end)
        group.start(place, variables)
        # Rank 0 has a copy. With this one open, connections to a dead rank 0 would not be refused.
        close_store()
        return group

    @classmethod
    def ready(cls, plan: Plan) -> Group:
        """Start a pool's workers, and wait until they can take a task."""
        if plan.start_method == "fork":
            judge_fork()
        waiting_line = WaitingLine(plan.num_processes)
        with contextlib.ExitStack() as undo_start, contextlib.closing(waiting_line):
            if template.uses_template(plan):
                pool_template = template.template_for(plan.device)
                pool_template.drop_outdated()
                # The cells to come may use anything that the notebook has.
                pool_template.wait(waiting_line.say, lambda _package: True)
                plan = pool_template.told_in(plan)
            hosts = LaunchHosts(plan)
            undo_start.callback(hosts.close)
            group = cls.started(undo_start, hosts, waiting_line, stays=True)
            group.await_start()
            # The start has succeeded: the group is the caller's to end.
            undo_start.pop_all()
        return group

    def start(self, place: MeetingPlace, variables: Mapping[str, str] | None = None) -> None:
        """Start all workers and tell each its place; they then wait for a task."""
        first_rank = self.plan.num_processes * place.node_rank
        self._rank_logs = self._on_end.enter_context(logs_of_run(self.plan, first_rank=first_rank))
        group_size = {"GROUP_WORLD_SIZE": str(place.num_nodes)}
        super().start(place, {**group_size, **(variables or {})})

    def let_exit(self) -> None:
        """Let idle workers do what libraries do at the end of a process, before they are ended."""
        with contextlib.suppress(StartupFailed):  # the template has ended, with all of them
            self._let_all_exit(time_limits.UNWIND_S)

    def _start_worker(self, rank: int) -> WorkerHandle:
        member = super()._start_worker(rank)
        if self.stays:
            self._sentinels[rank] = self._starter.sentinel(member.pid)
            # A fork of the next worker would inherit this descriptor and keep it open.
            self._keep_from_children(self._sentinels[rank])
        return member

    def await_start(self) -> None:
        """Wait until the workers of a pool can take a task."""
        result = self.run_tasks({}, ranks=[member.rank for member in self.members])
        if result.interrupted:
            raise LaunchInterrupted(
                f"all {len(self.members)} workers have been ended at their start"
            )
        if (error := outcome.call_error(result, self.plan)) is not None:
            raise error

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a worker may have ended."""
        if not self.stays:
            return super().sentinels()
        return [self._sentinels[member.rank] for member in self.members if not member.has_ended]

    def collect(self) -> Sequence[messaging.Ended]:
        """Workers that have ended; all of a pool's, if the process they came from has."""
        try:
            return super().collect()
        except StartupFailed as error:
            if not self.stays:
                raise
            reason = str(error).partition("\n")[0]
            status = self._starter.status or 0
            running_ids = [member.pid for member in self.members if not member.has_ended]
            return [messaging.Ended(pid, status, 0, reason) for pid in running_ids]

    # ---- tasks

    def run_tasks(
        self,
        tasks: RankTasks,
        *,
        ranks: Collection[int] | None = None,
        timeout_s: float | None = None,
        place: CellPlace | None = None,
        make_show: Callable[[], DashboardUpdater] | None = None,
    ) -> CallResult:
        """Give some workers a task each, and watch until all of them, or `ranks`, have finished."""
        ranks = ranks or tasks
        member_ranks = [member.rank for member in self.members]
        prefix = self.plan.config.log_line_prefix_template
        if prefix is None and self.stays and len(member_ranks) == 1:
            # A single worker needs no prefix to tell its lines from others.
            prefix = ""
        console = Console(
            member_ranks,
            prefix_template=prefix,
            hidden=hidden_streams(self.plan.config.shown_output, member_ranks),
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
            self.why_lost = why_lost(result)
        return result

    def everyone(self, body: Any, fds: Sequence[int] = ()) -> CallResult:
        """Give all workers the same task."""
        return self.run_tasks({member.rank: (body, fds) for member in self.members})

    def post(self, body: Any) -> None:
        """Give all workers a task without waiting for it; it is done before the next one."""
        for member in self.members:
            # The worker may have ended; the next task reports that.
            with contextlib.suppress(OSError):
                member.channel.send(messaging.Task(number=0, body=body))

    # ---- between tasks

    def rank_rows(self) -> list[RankStatus]:
        """How each worker stands by what is known of it here; none is asked."""
        now = time.monotonic()
        open_ranks = frozenset() if self._task is None else self._task.open
        ended = self._ended_ranks()
        return [
            rank_status(
                member,
                now - member.since,
                None if member.rank in ended else self._latest_place(member, open_ranks),
                is_open=member.rank in open_ranks,
                is_gone=member.rank in ended,
            )
            for member in self.members
        ]

    def _latest_place(
        self, member: WorkerHandle, ranks: frozenset[int]
    ) -> messaging.Whereabouts | None:
        """What a worker has answered last: while a cell runs it is asked about once a second."""
        in_task = member.whereabouts if member.rank in ranks else None
        return in_task or self._answers.get(member.rank)

    def _ended_ranks(self) -> frozenset[int]:
        """Ranks whose process is gone, though no task has noticed it yet."""
        poll = select.poll()
        rank_of = {
            self._sentinels[member.rank]: member.rank
            for member in self.members
            if not member.has_ended
        }
        for sentinel in rank_of:
            poll.register(sentinel, select.POLLIN)
        return frozenset(rank_of[sentinel] for sentinel, _ in poll.poll(0))

    def ask_whereabouts(self) -> None:
        """Ask all workers where they are; of those that do not answer at once nothing is known."""
        answers: dict[int, messaging.Whereabouts] = {}
        waiting = {m.channel.fileno(): m for m in self.members if not m.hung_up}
        for member in waiting.values():
            member.ask_where()
        deadline = time.monotonic() + time_limits.ASK_STATUS_S
        while waiting and (time_left := deadline - time.monotonic()) > 0:
            for fd in select.select(list(waiting), [], [], time_left)[0]:
                try:
                    answer, _ = waiting[fd].channel.receive()
                # The worker has ended; the next task reports why.
                except EOFError:
                    del waiting[fd]
                    continue
                if isinstance(answer, messaging.Whereabouts):
                    answers[waiting.pop(fd).rank] = answer
                elif isinstance(answer, messaging.Leaves):
                    waiting[fd].note(answer)
                elif isinstance(answer, (messaging.Display, messaging.ClearOutput)):
                    # Displayed by a thread that a cell has left running.
                    publish.show_message(answer)
        self._answers = answers

    def _close_sentinels(self) -> None:
        while self._sentinels:
            os.close(self._sentinels.popitem()[1])


def _meeting_place(plan: Plan) -> MeetingPlace:
    """Where workers meet whose notebook, or node 0's, has the store's socket."""
    config = plan.config
    store_socket = listen(plan.master_addr, plan.port) if config.node_rank == 0 else None
    return MeetingPlace(
        address=plan.master_addr,
        port=store_socket.getsockname()[1] if store_socket is not None else plan.port or 0,
        store_socket=store_socket,
        node_rank=config.node_rank,
        num_nodes=config.num_nodes,
    )


def _local_starter(
    plan: Plan, waiting_line: WaitingLine, forked_call: worker.WorkerCall | None
) -> Starter:
    if forked_call is not None:
        return ForkStarter(forked_call, is_asked=plan.config.start_method == "fork")
    if plan.start_method == "fork":
        return ForkStarter()
    return TemplateStarter(plan.device, threads=plan.threads_per_process, say=waiting_line.say)
