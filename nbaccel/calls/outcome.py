"""How a call ended, and what is made of it: results, or one exception that explains it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from torch import nn

from nbaccel.base import errors, frames
from nbaccel.base.units import first_few, format_seconds
from nbaccel.calls.supervisor import CallResult
from nbaccel.config.given_values import closest
from nbaccel.output import publish
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report import report_of
from nbaccel.plan import Plan
from nbaccel.transfer import pickling
from nbaccel.workers import failure
from nbaccel.workers.failure import PortableException
from nbaccel.workers.worker_processes import WorkerHandle

LATEST_FAILURE: list[failure.FailureRecord] = []
"""What is known of each rank of the last launch or cell that failed, the cause first."""


class RemoteTraceback(Exception):
    """The traceback as the worker saw it, in full."""


_CallError = TypeVar("_CallError", errors.WorkerFailed, errors.LaunchInterrupted)


def with_report(error: _CallError, observed: RunBoard | None) -> _CallError:
    """The exception that a call ends with, which has the report of it."""
    if observed is not None:
        error.make_report = functools.partial(report_of, observed, type(error).__name__)
    return error


def call_error(result: CallResult, plan: Plan, *, closing_lines: str = "") -> errors.WorkerFailed:
    """The exception that a call which is not complete ends with."""
    return with_report(_failure_error(result, plan, closing_lines), result.observed)


def _failure_error(result: CallResult, plan: Plan, closing_lines: str) -> errors.WorkerFailed:
    members = result.members
    records = [m.record or m.record_of_stop() for m in members if m.returned is None]
    # None where all ranks returned while they were being stopped, their calls cut short.
    cause = failure.first_cause(records) if records else None
    LATEST_FAILURE[:] = sorted(records, key=lambda record: (record is not cause, record.rank))
    if cause is None or result.timed_out:
        timeout = format_seconds(plan.config.timeout or 0.0)
        lines = [
            f"The launch did not end within timeout={timeout}:",
            *where_ranks_were(result),
            f"{closing_lines} Allow more time, or look at the lines above for a rank that waits "
            "for another.",
        ]
        return errors.LaunchTimeout("\n".join(lines), failure=cause, failures=tuple(records))
    if result.stuck:
        ranks = ", ".join(str(member.rank) for member in result.stuck)
        stacks = "".join(f"\n{m.stack_text.strip()}" for m in result.stuck if m.stack_text)
        return errors.StartupFailed(
            f"Worker {ranks} of {plan.world_size} was forked but never ran: it hangs on something "
            f"that the fork copied in a locked state (a thread of the notebook held it).{stacks}\n"
            "Use start_method='template', whose workers do not come from the notebook process.",
            failures=tuple(records),
        )
    headline, advice = _of_several_ranks(result, records, cause)
    text = failure.failure_text(
        records,
        plan.world_size,
        last_output=result.console.tails(),
        library_messages=result.console.library_messages.lines(),
        headline=headline,
        advice=advice,
        closing=closing_lines,
    )
    return _build_error(text, records, next(m for m in members if m.rank == cause.rank))


def where_ranks_were(result: CallResult, through: str = "had returned") -> list[str]:
    """A line for each rank: what it was doing when it was stopped, or how it has ended."""
    lines = []
    for member in result.members:
        record = member.record or member.record_of_stop()
        words = through if member.returned is not None else record.headline
        lines.append(f"  rank {member.rank} {words}")
    return lines


def _build_error(
    text: str, records: Sequence[failure.FailureRecord], member: WorkerHandle
) -> errors.WorkerFailed:
    """An exception that is both a `WorkerFailed` and of the type that this worker raised."""
    cause = failure.first_cause(records)
    base = errors.WorkerDied if cause.raised is None else errors.WorkerFailed
    error = base.__new__(base)
    original = None
    if member.failed is not None and member.failed.payload is not None:
        with contextlib.suppress(Exception):  # its class may be one that this process lacks
            original = pickling.unpack(member.failed.payload, member.handed_fds[0], {})
    if isinstance(original, PortableException) and issubclass(original.kind, Exception):
        names = {"__str__": errors.WorkerFailed.__str__, "__module__": base.__module__}
        # Two types that do not go together, or a metaclass that refuses: the text has its name.
        with contextlib.suppress(Exception):
            error = cast("errors.WorkerFailed", original.revive(base, names))
    errors.WorkerFailed.__init__(error, text, failure=cause, failures=tuple(records))
    if cause.raised is not None:
        error.__cause__ = RemoteTraceback(cause.full_traceback)
        if cause.raised.parts:
            # IPython ignores `_render_traceback_` of exception groups, which this may be, too.
            publish.show_by_its_text(type(error))
    return error


def _of_several_ranks(
    result: CallResult, records: Sequence[failure.FailureRecord], cause: failure.FailureRecord
) -> tuple[str, str]:
    """A headline and advice, where only all ranks together tell what has happened."""
    returned = [member for member in result.members if member.returned is not None]
    if cause.is_consequence and returned:
        rank_names = ", ".join(str(member.rank) for member in returned)
        return f"waited for rank {rank_names}, which had already returned", (
            "A collective (all_reduce, barrier, a DDP backward) needs every rank. Look for a "
            "branch on the rank or for ranks with different numbers of batches."
        )
    messages = [record.raised.message for record in records if record.raised is not None]
    console = result.console
    lines = itertools.chain(*console.tails().values(), console.library_messages.lines())
    if any(map(failure.UNLIKE_COLLECTIVES.search, (*messages, *lines))):
        return "", (
            "Ranks met in one collective for different things. Under ZeRO-3 a module gathers its "
            "weights when it runs: all ranks must run the same modules, in the same order (an "
            "expert without rows gets an empty batch), equally often. Or use ZeRO stage 2."
        )
    return "", ""


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
WORKERS_LOST = "All workers were ended; their variables are lost. The next cell starts new ones."


def task_error(
    result: CallResult, plan: Plan, unsendable: Mapping[str, str]
) -> errors.WorkerFailed | errors.LaunchInterrupted | None:
    """What a task in live workers has to raise, with what is left; None if it ended well."""
    if result.interrupted:
        lines = ["the cell was stopped.", *where_ranks_were(result, "was through with it")]
        message = "\n".join([*lines, _what_is_left(result)])
        return with_report(errors.LaunchInterrupted(message), result.observed)
    if result.is_complete:
        return None
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
    return call_error(result, plan, closing_lines="\n".join([*lines, _what_is_left(result)]))


def _what_is_left(result: CallResult) -> str:
    if result.lost:
        return f"{WORKERS_LOST} The notebook's own variables and models are as before this cell."
    was_regrouped = result.out_of_step and True in result.in_groups
    return f"{_STILL_ALIVE} {_REGROUPED}" if was_regrouped else _STILL_ALIVE


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


def after_call(result: CallResult) -> tuple[str, str]:
    """What a Stop and a failure of a call in live workers say at their end."""
    if result.lost:
        return (
            "the call was stopped, and the workers were ended; the model is as it was",
            f"The notebook's model is as it was before the call. {WORKERS_LOST}",
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
