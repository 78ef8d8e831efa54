"""What a launch ends with: results, or one exception that explains everything."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol, cast

from nbaccel import frames
from nbaccel.errors import LaunchTimeout, StartupFailed, WorkerDied, WorkerFailed
from nbaccel.launch import failure, publish
from nbaccel.launch.member import Member
from nbaccel.launch.remains import Remains
from nbaccel.launch.sharing import parcel
from nbaccel.units import format_seconds

_LATEST: list[failure.Record] = []


def latest() -> tuple[failure.Record, ...]:
    """What is known of each rank of the last launch or cell that failed, the cause first."""
    return tuple(_LATEST)


class Watched(Protocol):
    """What is known after the workers were watched."""

    members: list[Member]
    interrupted: bool
    timed_out: bool
    stuck: list[Member]
    closing: str
    """The last line of an obituary: what is left."""

    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""


class RemoteTraceback(Exception):
    """The traceback as the worker saw it, in full."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Unsendable:
    """Stands in the results for a value that could not leave its worker.

    Attributes:
        reason: What it was, and why it could not be sent.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"


def results(members: Sequence[Member]) -> tuple[list[Any], list[str]]:
    """The return values by rank, and what could not be sent."""
    values: list[Any] = []
    lost: list[str] = []
    for member in members:
        message = member.returned
        if message is None:
            continue
        try:
            values.append(_open(message, member.result_fd))
        except Exception as error:  # a class the notebook lacks, a __setstate__ that raises: any
            reason = f"rank {member.rank}'s result cannot be opened here: {error!r}"
            values.append(Unsendable(reason))
        if isinstance(values[-1], Unsendable):
            lost.append(values[-1].reason)
    return values, lost


def _open(message: Any, fd: int | None) -> Any:
    if message.parcel is None or fd is None:
        return Unsendable(message.unsendable)
    return parcel.unpack(message.parcel, fd, {})


def error(watch: Watched, *, world_size: int, timeout_s: float | None) -> WorkerFailed | None:
    """The exception that a launch which did not succeed ends with; None if it succeeded."""
    members = watch.members
    if all(m.returned is not None for m in members) and not watch.timed_out:
        return None
    records = [m.record or _bystander(m, watch) for m in members if m.returned is None]
    cause = failure.first_cause(records) if records else None
    _LATEST[:] = sorted(records, key=lambda record: (record is not cause, record.rank))
    if watch.timed_out:
        return _timeout(watch, records, world_size, timeout_s)
    if watch.stuck:
        return _stuck(watch, records, world_size)
    obituary = _obituary(watch, records, world_size)
    cause = obituary.cause
    member = next(m for m in members if m.rank == cause.rank)
    original = _original(member)
    base = WorkerDied if cause.raised is None else WorkerFailed
    return build(base, obituary, original)


def build(
    base: type[WorkerFailed], obituary: failure.Obituary, original: Remains | None
) -> WorkerFailed:
    """An exception that is both a `WorkerFailed` and of the type the worker raised."""
    text = "\n".join(obituary.lines())
    found = _blend(base, original)
    WorkerFailed.__init__(found, text, failure=obituary.cause, failures=obituary.records)
    if obituary.cause.raised is not None and obituary.cause.raised.parts:
        publish.show_by_its_text(type(found))
    if obituary.cause.raised is not None:
        found.__cause__ = RemoteTraceback(full_traceback(obituary.cause))
    return found


def _blend(base: type[WorkerFailed], original: Remains | None) -> WorkerFailed:
    names = {"__str__": WorkerFailed.__str__, "__module__": base.__module__}
    if original is not None and issubclass(original.kind, Exception):
        # Two types that do not go together, or a metaclass that refuses: the text has its name.
        with contextlib.suppress(Exception):
            return cast("WorkerFailed", original.revive(base, names))
    return base.__new__(base)


def full_traceback(record: failure.Record) -> str:
    """The worker's whole traceback, causes first, in Python's own form."""
    parts: list[str] = []
    raised = record.raised
    while raised is not None:
        parts.insert(0, _traceback(raised))
        raised = raised.cause
    return f"rank {record.rank}:\n" + "\n\nwhich led to:\n\n".join(parts)


def _traceback(raised: failure.Raised) -> str:
    lines = ["Traceback (most recent call last), in the worker:"]
    for frame in raised.frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        code = frames.source_line(frame)
        lines += [f"    {code}"] if code else []
    lines += [f"{raised.type_name}: {raised.message}", *raised.notes]
    for number, part in enumerate(raised.parts, 1):
        lines += [f"which has, as number {number}:", textwrap.indent(_traceback(part), "  ")]
    return "\n".join(lines)


def _original(member: Member) -> Remains | None:
    if member.error is None or member.error[0].parcel is None or member.error[1] is None:
        return None
    try:
        found = parcel.unpack(member.error[0].parcel, member.error[1], {})
    except Exception:  # its class cannot be had here; the description is complete without it
        return None
    return found if isinstance(found, Remains) else None


def stopped(watch: Watched, text: str) -> str:
    """What a Stop ends with: a line of text, and where each rank was.

    Args:
        watch: Who watched the workers.
        text: What is left.
    """
    lines = [text]
    for member in watch.members:
        if member.returned is not None:
            lines.append(f"  rank {member.rank} had returned")
        else:
            record = member.record or _bystander(member, watch)
            lines.append(f"  rank {record.rank} {record.headline}")
    return "\n".join(lines)


def _bystander(member: Member, watch: Watched) -> failure.Record:
    """A rank that did nothing wrong and was stopped."""
    doing = failure.doing(member.stack()) if member.stack_text else "had not started"
    return failure.Record(
        rank=member.rank,
        time=float("inf"),
        doing=f"was {doing} when nbaccel stopped it" if member.stack_text else doing,
        stack=member.stack(),
    )


def _obituary(
    watch: Watched, records: Sequence[failure.Record], world_size: int
) -> failure.Obituary:
    cause = failure.first_cause(records)
    gone = [m for m in watch.members if m.returned is not None]
    headline = advice = ""
    if cause.is_consequence and gone:
        who = ", ".join(str(m.rank) for m in gone)
        headline = f"waited for rank {who}, which had already returned"
        advice = (
            "A collective (all_reduce, barrier, a DDP backward) needs every rank. Look for a "
            "branch on the rank or for ranks with different numbers of batches."
        )
    return failure.Obituary(
        records=tuple(records),
        world_size=world_size,
        last_output=watch.tails(),
        headline=headline,
        advice=advice,
        closing=watch.closing,
    )


def _timeout(
    watch: Watched, records: Sequence[failure.Record], world_size: int, timeout_s: float | None
) -> LaunchTimeout:
    lines = [f"The launch did not end within timeout={format_seconds(timeout_s or 0.0)}:"]
    lines += [f"  rank {r.rank} {r.headline}" for r in records]
    lines += [f"  rank {m.rank} had returned" for m in watch.members if m.returned is not None]
    lines.append(
        f"{watch.closing} Allow more time, or look at the lines above for a rank that waits for "
        "another."
    )
    # Those that return while they are being stopped had a call cut short by our signals.
    first = failure.first_cause(records) if records else None
    return LaunchTimeout("\n".join(lines), failure=first, failures=tuple(records))


def _stuck(watch: Watched, records: Sequence[failure.Record], world_size: int) -> StartupFailed:
    ranks = ", ".join(str(m.rank) for m in watch.stuck)
    stacks = "".join(f"\n{m.stack_text.strip()}" for m in watch.stuck if m.stack_text)
    return StartupFailed(
        f"Worker {ranks} of {world_size} was forked but never ran: it hangs on something that the "
        f"fork copied in a locked state (a thread of the notebook held it).{stacks}\n"
        "Use start_method='template', whose workers do not come from the notebook process.",
        failures=tuple(records),
    )
