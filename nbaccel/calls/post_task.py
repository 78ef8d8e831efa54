"""What follows a task, successful or not: ranks in step again, and weights copied back.

write_weights ─► every rank writes its part into staging files ─► Staged
          all ranks have: the notebook copies it into the arenas ─► share_equal_pages
          a rank failed, died or was stopped: the files are dropped, and nothing has changed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbaccel.base.errors import LaunchInterrupted, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.calls import outcome
from nbaccel.calls.group import Group
from nbaccel.calls.launch import staged
from nbaccel.calls.pool_messages import PoolTask
from nbaccel.calls.supervisor import CallResult
from nbaccel.transfer.arena import Sharing
from nbaccel.transfer.namespace_snapshot import ModuleRecord
from nbaccel.transfer.namespace_sync import NamespaceSync
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers.messaging import FileHints
from nbaccel.workers.starters import dispose


class PostTask:
    """Puts workers in order after each task. One per start of a pool."""

    def __init__(self, namespace_sync: NamespaceSync) -> None:
        self._namespace_sync = namespace_sync
        self._generation = 0
        self._reported_lines: dict[tuple[str, str], str] = {}

    def keep_in_step(self, group: Group, result: CallResult) -> CallResult | None:
        """Let all ranks leave unusable process groups, with a message if there has been none."""
        # After a loss all workers are ended, and their groups with them.
        if result.lost or not result.out_of_step:
            return None
        # Taken first, because the next task makes the members forget this one.
        ended_well = all(member.returned is not None for member in result.members)
        self._generation += 1
        closed = group.everyone(PoolTask("close_groups", {"generation": self._generation}))
        if ended_well:
            write_notice(outcome.UNEVEN_COLLECTIVES)
        return closed

    def after_cell(self, group: Group, result: CallResult) -> BaseException | None:
        """Put the groups in order and copy the weights back, after a cell that lost no worker.

        The caller holds interrupts back, because a model with half of the new weights is useless.
        Returns what went wrong with that, if anything did.
        """
        closed = self.keep_in_step(group, result)
        if closed is not None and not closed.went_well:
            words = "This was after the cell, while its process groups were ended."
            if any(idle.dirty for idle in result.idle.values()):
                words += " The weights that it trained were not written back."
            return _error_of(group, closed, words)
        if not group.plan.config.share_back:
            return None
        keys = {key for idle in result.idle.values() for key in idle.dirty}
        records = self._namespace_sync.records(keys)
        return self._copy_weights_back(group, records) if records else None

    def _copy_weights_back(
        self, group: Group, records: Sequence[ModuleRecord]
    ) -> BaseException | None:
        """Copy back the weights that ranks changed: of all these modules, or of none."""
        unchanged = _unchanged_words(sorted(record.path for record in records))
        arenas = {key: found for record in records for key, found in record.sharing.arenas.items()}
        try:
            sharing = Sharing.joined(record.sharing for record in records)
            with staged(sharing, arenas) as receiver:
                files = [receiver.staging[key] for key in arenas]
                keys = tuple(arenas)
                task = PoolTask("write_weights", {"arenas": keys}, FileHints(staging=keys))
                result = group.everyone(task, files)
                try:
                    if not result.went_well:
                        return _error_of(group, result, unchanged)
                    self._apply(records, receiver, result)
                finally:
                    # Closed by the template process: freeing gigabytes would delay the next cell.
                    dispose(list(result.whole_files.values()))
        # No memory or no descriptors: nothing has been written yet.
        except OSError as error:
            return WorkerFailed(
                f"The notebook has no room for the trained weights: {error.strerror or error}. "
                f"{unchanged} The workers live on and have the trained weights: close what holds "
                "memory or files open, and the next cell writes them back."
            )
        hints = FileHints(reads_arenas=True, ends_staging=True)
        group.post(PoolTask("share_equal_pages", hints=hints))
        return None

    def _apply(
        self, records: Sequence[ModuleRecord], receiver: WeightReceiver, result: CallResult
    ) -> None:
        reports = [result.staged[rank].report for rank in sorted(result.staged)]
        # Before `apply`, which overwrites the values that the ranks are compared with.
        differing = receiver.differing(reports)
        # Otherwise these new values would count as the notebook's change and be sent to all ranks.
        with self._namespace_sync.taking_weights(records):
            receiver.apply(reports, result.whole_files)
        keys = {record.path: record.key for record in records}
        pull = "Pull what you need, for example its state_dict."
        for path, reason in (pair for report in reports for pair in report.stranded.items()):
            line = (
                f"the weights of {path} stay in the workers, because they no longer fit the "
                f"notebook's module ({reason}). {pull}"
            )
            self._tell(path, keys, line)
        for path, change in (pair for report in reports for pair in report.changes.items()):
            line = (
                f"the weights of {path} were copied into the notebook's module, but are not as "
                f"they are in the worker: {change}. {pull}"
            )
            self._tell(path, keys, line)
        for path, line in differing.items():
            self._tell(path, keys, line)

    def _tell(self, path: str, keys: Mapping[str, str], line: str) -> None:
        """Write a line out, unless it was the last one about this module.

        The next module of the same path is another one: a cell that makes it is run again.
        """
        name = (path, keys.get(path, ""))
        if self._reported_lines.get(name) != line:
            write_notice(f"nbaccel: {line}\n")
        self._reported_lines[name] = line


def _error_of(group: Group, result: CallResult, words: str) -> BaseException:
    """The error of a task that followed a cell."""
    if result.lost:
        words = "\n".join(
            [
                words,
                *([result.lost_because] if result.lost_because else []),
                "All workers have been ended, and their variables are lost. The next cell starts "
                "new ones.",
            ]
        )
    else:
        words += (
            " The workers live on and have the trained weights: remove the cause, and the next "
            "cell writes them back."
        )
    if result.interrupted:
        return LaunchInterrupted(f"the notebook was interrupted. {words}")
    return outcome.call_error(result, group.plan, closing_lines=words)


def _unchanged_words(paths: Sequence[str]) -> str:
    """What has become of weights when workers failed after the cell had ended."""
    names = paths[0]
    if len(paths) > 1:
        names = f"{', '.join(paths[:-1])} and {paths[-1]}"
    verb = "are" if len(paths) > 1 else "is"
    return (
        f"This was after the cell, while the weights that it trained in {names} were written "
        f"back: in the notebook {names} {verb} as before the cell, all of the weights old and none "
        "new."
    )
