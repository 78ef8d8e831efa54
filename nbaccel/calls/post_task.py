"""What follows a task, successful or not: ranks in step again, and weights copied back.

WriteWeights ─► every rank writes its part into staging files ─► Staged
          all ranks have: the notebook copies it into the arenas ─► WeightsReceived
          a rank failed, died or was stopped: the files are dropped, and nothing has changed
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nbaccel.base.errors import LaunchInterrupted, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.calls import message_texts, outcome, pool_messages
from nbaccel.calls.group import Group
from nbaccel.calls.outcome import CallResult
from nbaccel.transfer import arena
from nbaccel.transfer.module_registry import ModuleRecord
from nbaccel.transfer.namespace_sync import NamespaceSync
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers.template_starter import dispose

__all__ = ["PostTask", "staged"]

_NoteLost = Callable[[CallResult], None]
"""Told of each task, as workers may have been lost in it. Not kept: it would keep the pool."""


class PostTask:
    """Puts workers in order after each task. One per start of a pool."""

    def __init__(self, group: Group, namespace_sync: NamespaceSync) -> None:
        self._workers = group
        self._namespace_sync = namespace_sync
        self._generation = 0
        self._reported_lines: dict[tuple[str, str], str] = {}

    def after_call(self, call_result: CallResult, note_lost: _NoteLost) -> None:
        """Put the groups in order after a call, which has brought its weights itself."""
        if (group_result := self._keep_in_step(call_result)) is not None:
            note_lost(group_result)

    def after_cell(self, call_result: CallResult, note_lost: _NoteLost) -> BaseException | None:
        """Put the groups in order and copy the weights back, after a cell that lost no worker.

        The caller holds interrupts back, because a model with half of the new weights is useless.

        Returns:
            What went wrong with that, if anything did.
        """
        group_result = self._keep_in_step(call_result)
        if group_result is not None and not group_result.went_well:
            return self._error_of(group_result, message_texts.left_behind(call_result), note_lost)
        return self._copy_weights_back(call_result, note_lost)

    def _error_of(
        self, result: CallResult, weights_text: str, note_lost: _NoteLost
    ) -> BaseException | None:
        lines = message_texts.after_cell(result, weights_text)
        error: BaseException | None = None
        if result.interrupted:
            error = LaunchInterrupted(f"the notebook was interrupted. {lines}")
        else:
            error = outcome.call_error(result, self._workers.plan, closing_lines=lines)
        note_lost(result)
        return error

    def _keep_in_step(self, call_result: CallResult) -> CallResult | None:
        """Let all ranks leave unusable process groups, with a message if there has been none."""
        # After a loss all workers are ended, and their groups with them.
        if call_result.lost or not call_result.out_of_step:
            return None
        # Taken first, because the next task makes the members forget this one.
        ended_well = all(member.returned is not None for member in call_result.members)
        self._generation += 1
        reason = "a cell was ended while ranks were waiting for each other"
        group_result = self._workers.everyone(
            pool_messages.CloseGroups(generation=self._generation, reason=reason)
        )
        if ended_well:
            write_notice(f"nbaccel: {message_texts.UNEVEN_COLLECTIVES}\n")
        return group_result

    def _copy_weights_back(
        self, call_result: CallResult, note_lost: _NoteLost
    ) -> BaseException | None:
        """Copy back the weights that ranks changed: of all these modules, or of none."""
        if not self._workers.plan.config.share_back:
            return None
        module_records = self._namespace_sync.records(
            {
                arena_key
                for idle_answer in call_result.idle.values()
                for arena_key in idle_answer.dirty
            }
        )
        if not module_records:
            return None
        module_paths = sorted(module_record.path for module_record in module_records)
        shared_arenas = {
            arena_key: tensor_arena
            for module_record in module_records
            for arena_key, tensor_arena in module_record.arenas.items()
        }
        try:
            with staged(module_records, shared_arenas) as weight_receiver:
                rank_files = [weight_receiver.staging[arena_key] for arena_key in shared_arenas]
                staging_result = self._workers.everyone(
                    pool_messages.WriteWeights(arenas=tuple(shared_arenas)), rank_files
                )
                try:
                    if not staging_result.went_well:
                        return self._error_of(
                            staging_result, message_texts.on_the_way(module_paths), note_lost
                        )
                    self._apply(module_records, weight_receiver, staging_result)
                finally:
                    # Closed by the template process: freeing gigabytes would delay the next cell.
                    dispose(staging_result.take_files())
        # No memory or no descriptors: nothing has been written yet.
        except OSError as error:
            return WorkerFailed(
                message_texts.no_room(message_texts.on_the_way(module_paths), error)
            )
        self._workers.post(pool_messages.WeightsReceived())
        return None

    def _apply(
        self,
        module_records: Sequence[ModuleRecord],
        weight_receiver: WeightReceiver,
        staging_result: CallResult,
    ) -> None:
        weight_reports = [
            staging_result.staged[rank_number].report
            for rank_number in sorted(staging_result.staged)
        ]
        # Before `apply`, which overwrites the values that the ranks are compared with.
        differing_models = weight_receiver.differing(weight_reports)
        # Otherwise these new values would count as the notebook's change and be sent to all ranks.
        with self._namespace_sync.taking_weights(module_records):
            weight_receiver.apply(weight_reports, staging_result.whole_files)
        told_lines = [
            (module_path, message_texts.stays_behind(module_path, stranded_reason))
            for weight_report in weight_reports
            for module_path, stranded_reason in weight_report.stranded.items()
        ]
        told_lines += [
            (module_path, message_texts.came_changed(module_path, change_words))
            for weight_report in weight_reports
            for module_path, change_words in weight_report.changes.items()
        ]
        told_lines += [
            (module_path, f"nbaccel: {report_line}\n")
            for module_path, report_line in differing_models.items()
        ]
        module_keys = {module_record.path: module_record.key for module_record in module_records}
        for module_path, told_line in told_lines:
            self._tell((module_path, module_keys.get(module_path, "")), told_line)

    def _tell(self, name: tuple[str, str], line: str) -> None:
        """Write a line out, unless it was the last one about this module.

        The next module of the same path is another one: a cell that makes it is run again.
        """
        if self._reported_lines.get(name) != line:
            write_notice(line)
        self._reported_lines[name] = line


@contextlib.contextmanager
def staged(
    module_records: Collection[ModuleRecord], shared_arenas: Mapping[str, arena.Arena]
) -> Iterator[WeightReceiver]:
    """Staging files for these arenas, as long as the block lasts."""
    sharing_parts = [module_record.sharing for module_record in module_records]
    sharing = functools.reduce(arena.Sharing.joined, sharing_parts, arena.Sharing())
    weight_receiver = WeightReceiver(sharing, shared_arenas)
    try:
        yield weight_receiver
    finally:
        weight_receiver.close(dispose)
