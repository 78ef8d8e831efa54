"""How a call ended, and what is made of it: results, or one exception that explains it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nbaccel.base import frames
from nbaccel.base.errors import (
    LaunchInterrupted,
    LaunchTimeout,
    StartupFailed,
    WorkerDied,
    WorkerFailed,
)
from nbaccel.base.process_death import uninterrupted
from nbaccel.base.units import count_noun, format_seconds
from nbaccel.calls import pool_messages
from nbaccel.output import publish
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report.run_report import report_of
from nbaccel.plan import Plan
from nbaccel.transfer import pickling
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers import failure, library_texts
from nbaccel.workers.portable_exception import PortableException
from nbaccel.workers.worker_handle import WorkerHandle

__all__ = ["CallOutcome", "CallResult", "conclude_call", "stopped_error"]


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """How a call ended."""

    members: tuple[WorkerHandle, ...]
    """The workers that had it, by rank, with what each has returned, raised or died of."""
    tails: dict[int, list[str]] = field(repr=False)
    """The last lines that each rank printed."""
    library_messages: list[str] = field(repr=False)
    """What libraries have printed that is folded away as long as all is well."""
    interrupted: bool
    """The user has stopped it."""
    timed_out: bool
    stuck: tuple[WorkerHandle, ...]
    """Workers that never sent a message."""
    observed: RunBoard | None = field(default=None, repr=False)
    """What was seen of it; None for one that is not shown."""
    idle: Mapping[int, pool_messages.Idle]
    """The last message of each rank of a pool that has finished."""
    lost: tuple[int, ...]
    """Ranks of a pool that have ended."""
    lost_because: str
    """Why all were lost at once, if it was that."""
    staged: Mapping[int, pool_messages.Staged]
    """What ranks have written into staging files."""
    whole_files: dict[str, int] = field(repr=False)
    """Descriptors of the ranks' own files that hold whole arenas, by key of the arena."""
    was_cut: bool
    """Whether a rank was cut off in a collective."""
    is_of_all: bool
    """Whether all workers had it."""

    @property
    def went_well(self) -> bool:
        """Whether every rank completed it."""
        return not self.interrupted and all(member.returned is not None for member in self.members)

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


_LATEST_FAILURE: list[failure.FailureRecord] = []


def latest_failure() -> tuple[failure.FailureRecord, ...]:
    """What is known of each rank of the last launch or cell that failed, the cause first."""
    return tuple(_LATEST_FAILURE)


class RemoteTraceback(Exception):
    """The traceback as the worker saw it, in full."""

    def __init__(self, message_text: str) -> None:
        super().__init__(message_text)
        self.text = message_text

    def __str__(self) -> str:
        return self.text


class UnsendableResult:
    """Stands in the results for a value that could not leave its worker.

    Attributes:
        reason: What it was, and why it could not be sent.
    """

    def __init__(self, unsendable_reason: str) -> None:
        self.reason = unsendable_reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"


def call_results(members: Sequence[WorkerHandle]) -> tuple[list[Any], list[str]]:
    """The return values by rank, and what could not be sent."""
    values: list[Any] = []
    lost_results: list[str] = []
    for member in members:
        message = member.returned
        if message is None:
            continue
        try:
            values.append(_open_result(message, member.result_fd))
        except Exception as error:  # a missing class, or the user's __setstate__: any
            reason = f"rank {member.rank}'s result cannot be opened here: {error!r}"
            values.append(UnsendableResult(reason))
        if isinstance(values[-1], UnsendableResult):
            lost_results.append(values[-1].reason)
    return values, lost_results


def _open_result(message: Any, fd: int | None) -> Any:
    if message.payload is None or fd is None:
        return UnsendableResult(message.unsendable)
    return pickling.unpack(message.payload, fd, {})


def stopped_error(message: str, call_result: CallResult) -> LaunchInterrupted:
    """The exception that a call ends with which the user stopped."""
    error = LaunchInterrupted(message)
    _note_report(error, call_result)
    return error


def _note_report(error: WorkerFailed | LaunchInterrupted, result: CallResult) -> None:
    if result.observed is not None:
        error.make_report = functools.partial(report_of, result.observed, type(error).__name__)


def call_error(
    call_result: CallResult, call_plan: Plan, *, closing_lines: str = ""
) -> WorkerFailed | None:
    """The exception that a call which did not succeed ends with; None if it succeeded."""
    members = call_result.members
    if all(m.returned is not None for m in members) and not call_result.timed_out:
        return None
    failed_error = _failure_error(call_result, call_plan, closing_lines)
    _note_report(failed_error, call_result)
    return failed_error


def _failure_error(result: CallResult, plan: Plan, closing_lines: str) -> WorkerFailed:
    members = result.members
    failure_records = [m.record or m.record_of_stop() for m in members if m.returned is None]
    first_failure = failure.first_cause(failure_records) if failure_records else None
    _LATEST_FAILURE[:] = sorted(
        failure_records,
        key=lambda failure_record: (failure_record is not first_failure, failure_record.rank),
    )
    if result.timed_out:
        return _timeout_error(result, failure_records, plan.config.timeout or 0.0, closing_lines)
    if result.stuck:
        return _stuck_lines(result, failure_records, plan.world_size)
    death_report = _death_report(result, failure_records, plan.world_size, closing_lines)
    first_failure = death_report.cause
    member = next(m for m in members if m.rank == first_failure.rank)
    original_error = _original_error(member)
    base_class = WorkerDied if first_failure.raised is None else WorkerFailed
    return build_error(base_class, death_report, original_error)


def build_error(
    base_class: type[WorkerFailed],
    death_report: failure.FailureReport,
    original_error: PortableException | None,
) -> WorkerFailed:
    """An exception that is both a `WorkerFailed` and of the type the worker raised."""
    text = "\n".join(death_report.lines())
    blended_error = _blended_error(base_class, original_error)
    WorkerFailed.__init__(
        blended_error, text, failure=death_report.cause, failures=death_report.records
    )
    # IPython ignores `_render_traceback_` of exception groups, which this error may be, too.
    if death_report.cause.raised is not None and death_report.cause.raised.parts:
        publish.show_by_its_text(type(blended_error))
    if death_report.cause.raised is not None:
        blended_error.__cause__ = RemoteTraceback(full_traceback(death_report.cause))
    return blended_error


def _blended_error(
    base_class: type[WorkerFailed], original_error: PortableException | None
) -> WorkerFailed:
    names = {"__str__": WorkerFailed.__str__, "__module__": base_class.__module__}
    if original_error is not None and issubclass(original_error.kind, Exception):
        # Two types that do not go together, or a metaclass that refuses: the text has its name.
        with contextlib.suppress(Exception):
            return cast("WorkerFailed", original_error.revive(base_class, names))
    return base_class.__new__(base_class)


def full_traceback(failure_record: failure.FailureRecord) -> str:
    """The worker's whole traceback, causes first, in Python's own form."""
    traceback_parts: list[str] = []
    error = failure_record.raised
    while error is not None:
        traceback_parts.insert(0, _traceback_lines(error))
        error = error.cause
    return f"rank {failure_record.rank}:\n" + "\n\nwhich led to:\n\n".join(traceback_parts)


def _traceback_lines(error: failure.RaisedError) -> str:
    text_lines = ["Traceback (most recent call last), in the worker:"]
    for frame in error.frames:
        text_lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        source_text = frames.source_line(frame)
        text_lines += [f"    {source_text}"] if source_text else []
    text_lines += [f"{error.type_name}: {error.message}", *error.notes]
    for line_number, traceback_part in enumerate(error.parts, 1):
        text_lines += [
            f"which has, as number {line_number}:",
            textwrap.indent(_traceback_lines(traceback_part), "  "),
        ]
    return "\n".join(text_lines)


def _original_error(member: WorkerHandle) -> PortableException | None:
    if member.error is None or member.error[0].payload is None or member.error[1] is None:
        return None
    try:
        unpacked_error = pickling.unpack(member.error[0].payload, member.error[1], {})
    except Exception:  # its class cannot be imported here; the description is complete without it
        return None
    return unpacked_error if isinstance(unpacked_error, PortableException) else None


def interruption_message(call_result: CallResult, message_text: str) -> str:
    """What a Stop ends with: a line of text, and where each rank was."""
    lines = [message_text]
    for member in call_result.members:
        if member.returned is not None:
            lines.append(f"  rank {member.rank} had returned")
        else:
            record = member.record or member.record_of_stop()
            lines.append(f"  rank {record.rank} {record.headline}")
    return "\n".join(lines)


def _death_report(
    call_result: CallResult,
    failure_records: Sequence[failure.FailureRecord],
    world_size: int,
    closing_lines: str,
) -> failure.FailureReport:
    first_failure = failure.first_cause(failure_records)
    returned_members = [member for member in call_result.members if member.returned is not None]
    error_headline = error_advice = ""
    if first_failure.is_consequence and returned_members:
        rank_names = ", ".join(str(member.rank) for member in returned_members)
        error_headline = f"waited for rank {rank_names}, which had already returned"
        error_advice = (
            "A collective (all_reduce, barrier, a DDP backward) needs every rank. Look for a "
            "branch on the rank or for ranks with different numbers of batches."
        )
    elif _met_for_different_things(call_result, failure_records):
        error_advice = (
            "Ranks met in one collective for different things. Under ZeRO-3 each module gathers "
            "its weights with all ranks when it runs: all ranks must run the same modules, in the "
            "same order and equally often. Run every module on every rank (an expert without rows "
            "gets an empty batch), or use ZeRO stage 2."
        )
    return failure.FailureReport(
        records=tuple(failure_records),
        world_size=world_size,
        last_output=call_result.tails,
        library_messages=call_result.library_messages,
        headline=error_headline,
        advice=error_advice,
        closing=closing_lines,
    )


def _met_for_different_things(
    result: CallResult, failure_records: Sequence[failure.FailureRecord]
) -> bool:
    messages = [record.raised.message for record in failure_records if record.raised is not None]
    lines = itertools.chain.from_iterable(result.tails.values())
    texts = (*messages, *lines, *result.library_messages)
    return any(map(library_texts.tells_of_unlike_collectives, texts))


def _timeout_error(
    call_result: CallResult,
    failure_records: Sequence[failure.FailureRecord],
    timeout_s: float,
    closing_lines: str,
) -> LaunchTimeout:
    text_lines = [f"The launch did not end within timeout={format_seconds(timeout_s)}:"]
    text_lines += [
        f"  rank {failure_record.rank} {failure_record.headline}"
        for failure_record in failure_records
    ]
    text_lines += [
        f"  rank {member.rank} had returned"
        for member in call_result.members
        if member.returned is not None
    ]
    text_lines.append(
        f"{closing_lines} Allow more time, or look at the lines above for a rank that waits for "
        "another."
    )
    # No records where all ranks returned while they were being stopped, their calls cut short.
    first_failure = failure.first_cause(failure_records) if failure_records else None
    return LaunchTimeout(
        "\n".join(text_lines), failure=first_failure, failures=tuple(failure_records)
    )


def _stuck_lines(
    result: CallResult, records: Sequence[failure.FailureRecord], world_size: int
) -> StartupFailed:
    ranks = ", ".join(str(member.rank) for member in result.stuck)
    rank_stacks = "".join(
        f"\n{member.stack_text.strip()}" for member in result.stuck if member.stack_text
    )
    return StartupFailed(
        f"Worker {ranks} of {world_size} was forked but never ran: it hangs on something "
        "that the fork copied in a locked state (a thread of the notebook held "
        f"it).{rank_stacks}\nUse start_method='template', whose workers do not come from the "
        "notebook process.",
        failures=tuple(records),
    )


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What a launch that succeeded hands to the notebook."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]
    """Weights of modules whose structure changed, so that they could not be copied in place."""
    observed: RunBoard | None = None
    """What was seen of it."""


def conclude_call(
    call_plan: Plan,
    call_result: CallResult,
    weight_receiver: WeightReceiver,
    *,
    was_stopped: str,
    closing_lines: str,
) -> CallOutcome:
    """Copy the weights back and open the results, or raise what went wrong."""
    if call_result.interrupted:
        raise stopped_error(interruption_message(call_result, was_stopped), call_result)
    failed_error = call_error(call_result, call_plan, closing_lines=closing_lines)
    if failed_error is not None:
        raise failed_error
    log_level = frames.caller_level()
    returned = [member.returned for member in call_result.members if member.returned]
    weight_reports = [message.weight_report for message in returned if message.weight_report]
    # Both compare with the notebook's old values, which `apply` overwrites.
    disturbed_paths = weight_receiver.disturbed()
    differing_models = weight_receiver.differing(weight_reports)
    # A model with half of the new weights would be useless.
    with uninterrupted():
        weight_receiver.apply(weight_reports)
    rank_values, lost_results = call_results(call_result.members)
    state_dicts = {
        module_path: state_dict
        for weight_report in weight_reports
        for module_path, state_dict in weight_report.state_dicts.items()
    }
    _tell_lost_results(lost_results, log_level + 1)
    for weight_report in weight_reports:
        for module_path, stranded_reason in weight_report.stranded.items():
            warnings.warn(
                f"The trained weights of {module_path} do not fit the notebook's module "
                f"({stranded_reason}), so it is as it was. They are in the results: "
                f"results.state_dicts[{module_path!r}].",
                stacklevel=log_level,
            )
        for module_path, change_words in weight_report.changes.items():
            warnings.warn(
                f"The trained weights of {module_path} were copied into the notebook's module, "
                f"but are not as they were in the worker: {change_words}. As they were, they "
                f"are in the results: results.state_dicts[{module_path!r}].",
                stacklevel=log_level,
            )
    for module_path in disturbed_paths:
        warnings.warn(
            f"The notebook wrote to {module_path} while the workers used it (from another "
            "thread?). Ranks saw the new values wherever they had not written themselves, so "
            "they may have trained on a mixture. Let that thread wait until the launch is "
            "over, or give it a copy.",
            stacklevel=log_level,
        )
    for report_line in differing_models.values():
        warnings.warn(report_line, stacklevel=log_level)
    return CallOutcome(
        values=rank_values,
        plan=call_plan,
        state_dicts=state_dicts,
        observed=call_result.observed,
    )


def _tell_lost_results(lost_results: Sequence[str], log_level: int) -> None:
    if lost_results:
        num_others = len(lost_results) - 1
        others = f", and so did {count_noun(num_others, 'more rank')}" if num_others else ""
        warnings.warn(
            f"{lost_results[0]}{others}. The results say so in its place.", stacklevel=log_level
        )
