"""What a pool says: of a cell that failed, and of what is left of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbaccel.base.units import count_noun
from nbaccel.calls.outcome import CallResult
from nbaccel.config.mistakes import closest
from nbaccel.workers import failure

__all__ = [
    "UNEVEN_COLLECTIVES",
    "after_call",
    "closing_lines",
    "new_workers_line",
    "stopped_message",
    "unknown_names",
    "why_lost",
]

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
