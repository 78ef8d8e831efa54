"""One task of a pool's workers, watched until each is idle again.

It ends in one of four ways: all ranks have finished; a rank raised, and the others have given the
task up; the user has stopped it; a worker was lost, and with it the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.calls import pool_messages
from nbaccel.calls.listening import CallDisplay
from nbaccel.calls.shutdown import AFTER_LOSS, KEEP_WORKERS, ShutdownLadder
from nbaccel.calls.supervisor import CallResult, Supervisor
from nbaccel.output.console import Console
from nbaccel.transfer import memfd
from nbaccel.workers import messaging
from nbaccel.workers.worker_group import WorkerGroup
from nbaccel.workers.worker_handle import WorkerHandle

__all__ = ["RankTasks", "TaskResult", "TaskSupervisor"]

RankTasks = Mapping[int, tuple[Any, Sequence[int]]]
"""Rank → a task's body, and the descriptors to send along."""


@dataclass(frozen=True, kw_only=True)
class TaskResult(CallResult):
    """How a task ended."""

    idle: Mapping[int, pool_messages.Idle]
    """The last message of each rank that has finished."""
    lost: tuple[int, ...]
    """Ranks that have ended."""
    lost_because: str
    """Why all were lost at once, if it was that."""
    staged: Mapping[int, pool_messages.Staged]
    """What ranks have written into staging files."""
    whole_files: dict[str, int] = field(repr=False)
    """Descriptors of the ranks' own files that hold whole arenas, by key of the arena."""
    was_cut: bool
    """Whether a rank was cut off in a collective."""
    is_of_all: bool
    """Whether all workers of the pool had the task."""

    @property
    def shown(self) -> dict[int, Any]:
        """What the task gives the user to see, by rank."""
        return {rank: answer.shown for rank, answer in self.idle.items()}

    def take_files(self) -> list[int]:
        """The descriptors of `whole_files`; they are the caller's to close."""
        file_descriptors = list(self.whole_files.values())
        self.whole_files.clear()
        return file_descriptors

    @property
    def out_of_step(self) -> bool:
        """Whether process groups cannot be used any longer.

        A rank was cut off in one of their collectives, or their ranks have begun different numbers
        of them: the next one would meet the wrong partner.
        """
        collective_counts: dict[str, set[int]] = {}
        for name, collective_count in (
            entry for answer in self.idle.values() for entry in answer.sequence
        ):
            # By name, because not all ranks need be in a group: absent ranks are no difference.
            collective_counts.setdefault(name, set()).add(collective_count)
        in_groups = {answer.in_groups for answer in self.idle.values()}
        differing_groups = len(in_groups) > 1 or any(
            len(counts) > 1 for counts in collective_counts.values()
        )
        return self.was_cut or (self.is_of_all and differing_groups)


class TaskSupervisor(Supervisor):
    """Watches one task."""

    def __init__(
        self,
        worker_group: WorkerGroup,
        ranks: Iterable[int],
        rank_tasks: RankTasks,
        *,
        task_number: int,
        console: Console,
        timeout_s: float | None = None,
        make_show: Callable[[], CallDisplay] | None = None,
    ) -> None:
        super().__init__(worker_group, KEEP_WORKERS, console=console, timeout_s=timeout_s)
        self._make_show = make_show
        self._tasks = rank_tasks
        self._number = task_number
        self._ranks = set(ranks)
        self._is_of_all = len(self._ranks) == len(self.members)
        self._open = {m.rank for m in self.participants() if not m.has_ended}
        self._joining: set[int] = set()
        """Ranks that have finished, or have no task, and join a process group for the others."""
        self._group_wanted: pool_messages.GroupWanted | None = None
        self._idle: dict[int, pool_messages.Idle] = {}
        self._staged: dict[int, pool_messages.Staged] = {}
        self._whole_files: dict[str, int] = {}
        self._lost: list[int] = []
        self._lost_because = ""
        for member in self.members:
            member.forget_call()
        for member in self.participants():
            member.begin_call()

    @property
    def open(self) -> frozenset[int]:
        """Ranks that have not finished yet."""
        return frozenset(self._open)

    def run(self) -> TaskResult:
        """Send the tasks, and wait until every rank has finished, or is lost."""
        self.watch()
        return TaskResult(
            **self.facts(),
            idle=self._idle,
            lost=tuple(self._lost),
            lost_because=self._lost_because,
            staged=self._staged,
            whole_files=self._whole_files,
            was_cut=self._ladder is not None and self._ladder.has_cut,
            is_of_all=self._is_of_all,
        )

    # ---- what follows for live workers

    def on_caught(self) -> None:
        """Send the tasks: the workers are at work while the rest is made ready to hear them."""
        ranks_by_body: dict[int, list[int]] = {}
        for worker_rank, (task_body, _) in self._tasks.items():
            ranks_by_body.setdefault(id(task_body), []).append(worker_rank)
        # Ranks mostly have the very same task, which is pickled once.
        for worker_ranks in ranks_by_body.values():
            task_body, _ = self._tasks[worker_ranks[0]]
            packet_bytes, files = messaging.pack_message(
                pool_messages.Task(number=self._number, body=task_body)
            )
            with memfd.closing_files(*files):
                for worker_rank in worker_ranks:
                    _, file_descriptors = self._tasks[worker_rank]
                    # The worker may have ended meanwhile; its sentinel says so.
                    with contextlib.suppress(OSError):
                        self.members[worker_rank].channel.send_packed(
                            packet_bytes, [*file_descriptors, *files]
                        )
        if self._make_show is not None:
            self._show = self._make_show()

    def is_over(self) -> bool:
        """Whether all ranks have finished; after a loss, whether all workers have ended."""
        if self._lost:
            return all(member.has_ended for member in self.members)
        # Under the ladder, joining ranks are interrupted too: their Idle is still to come.
        return not (self._open or (self._ladder is not None and self._joining))

    def participants(self) -> list[WorkerHandle]:
        """Workers that have the task, and those that were lost meanwhile."""
        return [member for member in self.members if member.rank in self._ranks]

    def at_work(self) -> list[WorkerHandle]:
        """Workers that are in the task, or join a group for those that are."""
        ranks = self._open | self._joining
        return [member for member in self.members if member.rank in ranks and not member.has_ended]

    def close_output(self) -> None:
        """Read what the task has printed; what comes later belongs to no task."""
        self.drain_readable()
        for member in self.members:
            if not member.has_ended:
                self._console.close(member.rank)

    def on_end(self, member: WorkerHandle, exit_status: messaging.Ended) -> None:
        """A worker is lost: ask the others where they are, then end them."""
        record = member.record or member.record_of_stop()
        if not member.is_stopped:
            record = member.record_of_death(exit_status, self._group.oom_kills)
        # Even a finished rank loses its result: without its worker the task has failed.
        member.end(record, loses_result=True)
        self._ranks.add(member.rank)
        self._open.discard(member.rank)
        self._lost.append(member.rank)
        self._lost_because = self._lost_because or exit_status.because
        # Only for the first: workers that end afterwards were killed by this ladder.
        if len(self._lost) == 1:
            other_members = [m for m in self.members if not m.has_ended]
            for other_member in other_members:
                # An answer of up to a second ago would be taken for the place of the failure.
                other_member.note_whereabouts(None)
            self.start_ladder(ShutdownLadder(other_members, AFTER_LOSS))

    # ---- what can happen

    def on_message(
        self, member: WorkerHandle, worker_message: Any, file_descriptors: list[int]
    ) -> None:
        """A worker has said something."""
        super().on_message(member, worker_message, file_descriptors)
        if isinstance(worker_message, pool_messages.Idle):
            self._on_idle(member, worker_message)
        elif isinstance(worker_message, pool_messages.Staged):
            self._staged[member.rank] = worker_message
            self._whole_files |= zip(worker_message.whole, file_descriptors, strict=True)
        elif isinstance(worker_message, messaging.Whereabouts):
            member.note_whereabouts(worker_message)
            if self._ladder is not None:
                self._ladder.answered(member)
        elif isinstance(worker_message, pool_messages.GroupWanted):
            self._on_group_wanted(worker_message)

    def on_failure(
        self, member: WorkerHandle, worker_message: messaging.Failed, file_descriptors: list[int]
    ) -> None:
        """A rank has raised; errors outside the task, such as in a join, are not reported."""
        if member.rank in self._open:
            super().on_failure(member, worker_message, file_descriptors)
        else:
            memfd.close_all(file_descriptors)

    def _on_idle(self, member: WorkerHandle, worker_message: pool_messages.Idle) -> None:
        rank = member.rank
        if worker_message.number == self._number:
            member.finish_call()
            self._open.discard(rank)
            self.drain_output(member)
            self._console.close(rank)
            self._idle[rank] = worker_message
            # A rank that has finished must join too, or the others would wait until the timeout.
            if self._group_wanted is not None and self._open:
                self._ask_to_join(member, self._group_wanted)
        else:
            self._joining.discard(rank)
        # After a loss a finished worker is ended too, so it stays on the ladder.
        if self._ladder is not None and rank not in self._open and not self._lost:
            self._ladder.finished(member)

    def _on_group_wanted(self, worker_message: pool_messages.GroupWanted) -> None:
        if self._group_wanted is None or worker_message.ordinal > self._group_wanted.ordinal:
            self._group_wanted = worker_message
            for member in self.members:
                if member.rank not in self._open and not member.has_ended:
                    self._ask_to_join(member, worker_message)

    def _ask_to_join(self, member: WorkerHandle, group_wanted: pool_messages.GroupWanted) -> None:
        self._joining.add(member.rank)
        # The worker may have ended; its sentinel says so.
        with contextlib.suppress(OSError):
            member.channel.send(
                pool_messages.Task(number=0, body=pool_messages.JoinGroup(wanted=group_wanted))
            )
