"""How a call ended, and what is made of it: results, or one exception that explains it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from nbaccel.base import frames
from nbaccel.base.errors import (
    LaunchInterrupted,
    LaunchTimeout,
    StartupFailed,
    WorkerDied,
    WorkerFailed,
)
from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import count_noun, first_few, format_seconds
from nbaccel.calls import pool_messages
from nbaccel.config.mistakes import closest
from nbaccel.output import publish
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report.run_report import report_of
from nbaccel.plan import Plan
from nbaccel.transfer import pickling
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.transfer.weight_writer import WeightReport
from nbaccel.workers import failure, messaging
from nbaccel.workers.failure import PortableException
from nbaccel.workers.worker_handle import WorkerHandle


@dataclass(kw_only=True)
class CallResult:
    """How a call ended; a `Supervisor` fills it in."""

    is_of_all: bool
    """Whether all workers had it."""
    members: tuple[WorkerHandle, ...] = ()
    """The workers that had it, by rank, with what each has returned, raised or died of."""
    tails: dict[int, list[str]] = field(default_factory=dict, repr=False)
    """The last lines that each rank printed."""
    library_messages: list[str] = field(default_factory=list, repr=False)
    """What libraries have printed that is folded away as long as all is well."""
    interrupted: bool = False
    """The user has stopped it."""
    timed_out: bool = False
    stuck: list[WorkerHandle] = field(default_factory=list)
    """Workers that never sent a message."""
    observed: RunBoard | None = field(default=None, repr=False)
    """What was seen of it; None for one that is not shown."""
    idle: dict[int, pool_messages.Idle] = field(default_factory=dict)
    """The last message of each rank of a pool that has finished."""
    lost: list[int] = field(default_factory=list)
    """Ranks of a pool that have ended."""
    lost_because: str = ""
    """Why all were lost at once, if it was that."""
    staged: dict[int, pool_messages.Staged] = field(default_factory=dict)
    """What ranks have written into staging files."""
    whole_files: dict[str, int] = field(default_factory=dict, repr=False)
    """Descriptors of the ranks' own files that hold whole arenas, by key of the arena."""
    was_cut: bool = False
    """Whether a rank was cut off in a collective."""

    @property
    def went_well(self) -> bool:
        """Whether every rank completed it."""
        return not self.interrupted and all(member.returned is not None for member in self.members)

    @property
    def came_to_end_of_step(self) -> bool:
        """Whether a call that was interrupted has handed over the weights of one whole step."""
        return all(m.returned is not None and not m.is_stopped for m in self.members)

    @property
    def shown(self) -> dict[int, Any]:
        """What the task gives the user to see, by rank."""
        return {rank: answer.shown for rank, answer in self.idle.items()}

    @property
    def out_of_step(self) -> bool:
        """Whether process groups cannot be used any longer.

        A rank was cut off in one of their collectives, or their ranks have begun different numbers
        of them: the next one would meet the wrong partner.
        """
        # By name, because not all ranks need be in a group: absent ranks are no difference.
        counts: dict[str, set[int]] = {}
        for idle in self.idle.values():
            for name, count in idle.sequence:
                counts.setdefault(name, set()).add(count)
        in_groups = {idle.in_groups for idle in self.idle.values()}
        differ = len(in_groups) > 1 or any(len(numbers) > 1 for numbers in counts.values())
        return self.was_cut or (self.is_of_all and differ)


_LATEST_FAILURE: list[failure.FailureRecord] = []


def latest_failure() -> tuple[failure.FailureRecord, ...]:
    """What is known of each rank of the last launch or cell that failed, the cause first."""
    return tuple(_LATEST_FAILURE)


class RemoteTraceback(Exception):
    """The traceback as the worker saw it, in full."""


class UnsendableResult:
    """Stands in the results for a value that could not leave its worker, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"


def _open_result(member: WorkerHandle, message: messaging.Returned) -> Any:
    if message.payload is None or member.result_fd is None:
        return UnsendableResult(message.unsendable or "")
    try:
        return pickling.unpack(message.payload, member.result_fd, {})
    except Exception as error:  # a missing class, or the user's __setstate__: any
        return UnsendableResult(f"rank {member.rank}'s result cannot be opened here: {error!r}")


def stopped_error(message: str, result: CallResult) -> LaunchInterrupted:
    """The exception that a call ends with which the user stopped."""
    error = LaunchInterrupted(message)
    _note_report(error, result)
    return error


def _note_report(error: WorkerFailed | LaunchInterrupted, result: CallResult) -> None:
    if result.observed is not None:
        error.make_report = functools.partial(report_of, result.observed, type(error).__name__)


def call_error(result: CallResult, plan: Plan, *, closing_lines: str = "") -> WorkerFailed | None:
    """The exception that a call which did not succeed ends with; None if it succeeded."""
    members = result.members
    if all(m.returned is not None for m in members) and not result.timed_out:
        return None
    error = _failure_error(result, plan, closing_lines)
    _note_report(error, result)
    return error


def _failure_error(result: CallResult, plan: Plan, closing_lines: str) -> WorkerFailed:
    members = result.members
    records = [m.record or m.record_of_stop() for m in members if m.returned is None]
    # None where all ranks returned while they were being stopped, their calls cut short.
    cause = failure.first_cause(records) if records else None
    _LATEST_FAILURE[:] = sorted(records, key=lambda record: (record is not cause, record.rank))
    if cause is None or result.timed_out:
        timeout = format_seconds(plan.config.timeout or 0.0)
        lines = [
            f"The launch did not end within timeout={timeout}:",
            *_where_ranks_were(result),
            f"{closing_lines} Allow more time, or look at the lines above for a rank that waits "
            "for another.",
        ]
        return LaunchTimeout("\n".join(lines), failure=cause, failures=tuple(records))
    if result.stuck:
        return _stuck_error(result, records, plan.world_size)
    report = _death_report(result, records, plan.world_size, closing_lines)
    return build_error(report, next(m for m in members if m.rank == report.cause.rank))


def _where_ranks_were(result: CallResult) -> list[str]:
    lines = []
    for member in result.members:
        record = member.record or member.record_of_stop()
        words = "had returned" if member.returned is not None else record.headline
        lines.append(f"  rank {member.rank} {words}")
    return lines


def build_error(report: failure.FailureReport, member: WorkerHandle) -> WorkerFailed:
    """An exception that is both a `WorkerFailed` and of the type the worker raised."""
    raised = report.cause.raised
    base = WorkerDied if raised is None else WorkerFailed
    error = base.__new__(base)
    original = _original_error(member)
    if original is not None and issubclass(original.kind, Exception):
        names = {"__str__": WorkerFailed.__str__, "__module__": base.__module__}
        # Two types that do not go together, or a metaclass that refuses: the text has its name.
        with contextlib.suppress(Exception):
            error = cast("WorkerFailed", original.revive(base, names))
    text = "\n".join(report.lines())
    WorkerFailed.__init__(error, text, failure=report.cause, failures=report.records)
    if raised is not None:
        error.__cause__ = RemoteTraceback(full_traceback(report.cause))
        if raised.parts:
            # IPython ignores `_render_traceback_` of exception groups, which this may be, too.
            publish.show_by_its_text(type(error))
    return error


def full_traceback(record: failure.FailureRecord) -> str:
    """The worker's whole traceback, causes first, in Python's own form."""
    parts: list[str] = []
    error = record.raised
    while error is not None:
        parts.insert(0, _traceback_lines(error))
        error = error.cause
    return f"rank {record.rank}:\n" + "\n\nwhich led to:\n\n".join(parts)


def _traceback_lines(error: failure.RaisedError) -> str:
    lines = ["Traceback (most recent call last), in the worker:"]
    for frame in error.frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        source = frames.source_line(frame)
        lines += [f"    {source}"] if source else []
    lines += [f"{error.type_name}: {error.message}", *error.notes]
    for line_number, part in enumerate(error.parts, 1):
        lines += [
            f"which has, as number {line_number}:",
            textwrap.indent(_traceback_lines(part), "  "),
        ]
    return "\n".join(lines)


def _original_error(member: WorkerHandle) -> PortableException | None:
    if member.error is None or member.error[0].payload is None or member.error[1] is None:
        return None
    try:
        unpacked = pickling.unpack(member.error[0].payload, member.error[1], {})
    except Exception:  # its class cannot be imported here; the description is complete without it
        return None
    return unpacked if isinstance(unpacked, PortableException) else None


def _death_report(
    result: CallResult,
    records: Sequence[failure.FailureRecord],
    world_size: int,
    closing_lines: str,
) -> failure.FailureReport:
    cause = failure.first_cause(records)
    returned = [member for member in result.members if member.returned is not None]
    headline = advice = ""
    if cause.is_consequence and returned:
        rank_names = ", ".join(str(member.rank) for member in returned)
        headline = f"waited for rank {rank_names}, which had already returned"
        advice = (
            "A collective (all_reduce, barrier, a DDP backward) needs every rank. Look for a "
            "branch on the rank or for ranks with different numbers of batches."
        )
    elif _met_for_different_things(result, records):
        advice = (
            "Ranks met in one collective for different things. Under ZeRO-3 each module gathers "
            "its weights with all ranks when it runs: all ranks must run the same modules, in the "
            "same order and equally often. Run every module on every rank (an expert without rows "
            "gets an empty batch), or use ZeRO stage 2."
        )
    return failure.FailureReport(
        records=tuple(records),
        world_size=world_size,
        last_output=result.tails,
        library_messages=result.library_messages,
        headline=headline,
        advice=advice,
        closing=closing_lines,
    )


def _met_for_different_things(result: CallResult, records: Sequence[failure.FailureRecord]) -> bool:
    messages = [record.raised.message for record in records if record.raised is not None]
    lines = itertools.chain.from_iterable(result.tails.values())
    texts = (*messages, *lines, *result.library_messages)
    return any(map(failure.tells_of_unlike_collectives, texts))


def _stuck_error(
    result: CallResult, records: Sequence[failure.FailureRecord], world_size: int
) -> StartupFailed:
    ranks = ", ".join(str(member.rank) for member in result.stuck)
    stacks = "".join(f"\n{m.stack_text.strip()}" for m in result.stuck if m.stack_text)
    return StartupFailed(
        f"Worker {ranks} of {world_size} was forked but never ran: it hangs on something that the "
        f"fork copied in a locked state (a thread of the notebook held it).{stacks}\nUse "
        "start_method='template', whose workers do not come from the notebook process.",
        failures=tuple(records),
    )


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What a launch hands to the notebook that succeeded, or was stopped where a step had ended."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]
    """Weights of modules whose structure changed, so that they could not be copied in place."""
    observed: RunBoard | None = None
    """What was seen of it."""
    stopped: LaunchInterrupted | None = None
    """What is to be raised where the user has stopped it and its weights are kept."""
    has_ended: bool = True
    """Whether the functions came to their ends."""


def conclude_call(
    plan: Plan,
    result: CallResult,
    receiver: WeightReceiver,
    *,
    was_stopped: str,
    closing_lines: str,
) -> CallOutcome:
    """Copy the weights back and open the results, or raise what went wrong."""
    if result.interrupted and not result.came_to_end_of_step:
        raise stopped_error("\n".join([was_stopped, *_where_ranks_were(result)]), result)
    if (error := call_error(result, plan, closing_lines=closing_lines)) is not None:
        raise error
    level = frames.caller_level()
    returned = [(member, member.returned) for member in result.members if member.returned]
    reports = [message.weight_report for _, message in returned if message.weight_report]
    # Both compare with the notebook's old values, which `apply` overwrites.
    disturbed = receiver.disturbed()
    differing = receiver.differing(reports)
    # A model with half of the new weights would be useless.
    with uninterrupted():
        receiver.apply(reports)
    values = [_open_result(member, message) for member, message in returned]
    for line in (
        *_lost_values_lines(values),
        *(line for report in reports for line in _weights_lines(report)),
        *map(_disturbed_line, disturbed),
        *differing.values(),
    ):
        warnings.warn(line, stacklevel=level)
    state_dicts = {
        path: state_dict for report in reports for path, state_dict in report.state_dicts.items()
    }
    return CallOutcome(
        values=values,
        plan=plan,
        state_dicts=state_dicts,
        observed=result.observed,
        stopped=_stopped_at_step(result, receiver) if result.interrupted else None,
        has_ended=_has_ended(result),
    )


def _stopped_at_step(result: CallResult, receiver: WeightReceiver) -> LaunchInterrupted:
    """The exception of a call that was stopped where a step had ended."""
    ranks = result.observed.ranks.values() if result.observed is not None else ()
    steps = max((facts.told.steps or 0 for facts in ranks), default=0)
    words = kept_words(None if _has_ended(result) else steps, receiver.modules)
    return stopped_error(words, result)


def _has_ended(result: CallResult) -> bool:
    return not any(m.returned is not None and m.returned.was_stopped for m in result.members)


def kept_words(steps: int | None, modules: Sequence[tuple[str, nn.Module]]) -> str:
    """What a Stop says that keeps the weights: the step, and where they are in the notebook."""
    ending = "it had ended already" if steps is None else f"stopped at step {steps}"
    if not modules:
        return ending
    shell = frames.running_shell()
    variables = tuple(shell.user_ns.items()) if shell is not None else ()
    names = []
    for path, module in modules:
        known = [name for name, value in variables if value is module and name[0] != "_"]
        names.append(f"`{known[0] if known else path}`")
    return f"{ending}; its weights are in {first_few(names, 3)}"


def _lost_values_lines(values: Sequence[Any]) -> list[str]:
    lost = [value.reason for value in values if isinstance(value, UnsendableResult)]
    if not lost:
        return []
    others = f", and so did {count_noun(len(lost) - 1, 'more rank')}" if len(lost) > 1 else ""
    return [f"{lost[0]}{others}. The results say so in its place."]


def _weights_lines(report: WeightReport) -> list[str]:
    lines = [
        f"The trained weights of {path} do not fit the notebook's module ({reason}), so it is as "
        f"it was. They are in the results: results.state_dicts[{path!r}]."
        for path, reason in report.stranded.items()
    ]
    lines += [
        f"The trained weights of {path} were copied into the notebook's module, but are not as "
        f"they were in the worker: {change}. As they were, they are in the results: "
        f"results.state_dicts[{path!r}]."
        for path, change in report.changes.items()
    ]
    return lines


def _disturbed_line(path: str) -> str:
    return (
        f"The notebook wrote to {path} while the workers used it (from another thread?). Ranks saw "
        "the new values wherever they had not written themselves, so they may have trained on a "
        "mixture. Let that thread wait until the launch is over, or give it a copy."
    )


# ---- what a pool says: of a cell that failed, and of what is left of its workers

_STILL_ALIVE = "The workers live on, with all their variables."
_RUN_AGAIN = (
    "by themselves; run the cells again that build what else holds one (a DeepSpeed engine, FSDP2, "
    "dist.new_group)."
)
_REGROUPED = (
    "Their process groups were ended, since ranks were waiting in them; the next collective "
    f"makes new ones. DDP models and Accelerators go on with these {_RUN_AGAIN}"
)
UNEVEN_COLLECTIVES = (
    "nbaccel: the ranks have called different numbers of collectives in this cell, so their "
    "process groups were ended: the next collective would have met the wrong partner. DDP models "
    f"and Accelerators go on in new ones {_RUN_AGAIN}\n"
)
_POOL_LOST = (
    "All workers have been ended, and their variables are lost. The next cell starts new ones. "
    "The notebook's own variables and models are as they were before this cell."
)


def closing_lines(result: CallResult, unsendable: Mapping[str, str]) -> str:
    """The closing lines of a failure report: what is left, and why a name was missing."""
    missing = {
        member.record.raised.missing_name
        for member in result.members
        if member.record and member.record.raised
    }
    lines = [
        f"The notebook has {name!r}, but it cannot be sent to the workers: {reason}"
        for name, reason in unsendable.items()
        if name in missing
    ]
    return "\n".join([*lines, _what_is_left(result)])


def _what_is_left(result: CallResult) -> str:
    if result.lost:
        return _POOL_LOST
    in_groups = any(idle.in_groups for idle in result.idle.values())
    return f"{_STILL_ALIVE} {_REGROUPED}" if result.out_of_step and in_groups else _STILL_ALIVE


def why_lost(result: CallResult) -> str:
    """In one clause, why a pool is broken."""
    if result.lost_because:
        return failure.as_clause(result.lost_because)
    records = [
        member.record
        for member in result.members
        if member.record is not None and member.rank in result.lost
    ]
    if not records:
        return "a worker was lost"
    cause = failure.first_cause(records)
    if cause.exit_status is None:
        return f"rank {cause.rank} did not answer an interrupt and had to be ended"
    return f"rank {cause.rank} {failure.name_exit(cause.exit_status)}"


def new_workers_line(num_processes: int, reason: str) -> str:
    """The line that says that new workers are started."""
    return (
        f"nbaccel: {count_noun(num_processes, 'new worker')} started, because {reason}; what "
        "the cells before had defined in them is gone.\n"
    )


def stopped_message(result: CallResult) -> str:
    """What a Stop has ended with."""
    lines = ["the cell was stopped."]
    for member in result.members:
        record = member.record
        if record is not None and record.doing:
            lines.append(f"  rank {member.rank} {record.doing}")
        elif member.returned is not None:
            lines.append(f"  rank {member.rank} was through with it")
    lines.append(_what_is_left(result))
    return "\n".join(lines)


def after_call(result: CallResult) -> tuple[str, str]:
    """What a Stop and a failure of a call in live workers say at their end."""
    if result.lost:
        return (
            "the call was stopped, and the workers were ended; the model is as it was",
            "The notebook's model is as it was before the call; all workers have been ended, and "
            "their variables are lost. The next cell starts new ones.",
        )
    return (
        "the call was stopped; the model is as it was, and the workers live on",
        "The notebook's model is as it was before the call; the workers live on.",
    )


def unknown_names(missing: Sequence[str], known: Iterable[str], owner: str) -> str:
    """Which names are not there, and which ones were probably meant."""
    if not missing:
        return f"No name was given: say which names of {owner} are meant, for example loss."
    names = [name for name in known if not name.startswith("_")]
    return " ".join(f"{owner} has no name {name!r}.{closest(name, names)}" for name in missing)
