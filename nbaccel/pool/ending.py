"""What a pool says: about a turn that ended badly, about itself, and while a cell runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from nbaccel.config.mistakes import closest
from nbaccel.launch import failure
from nbaccel.launch.dashboard.following import Following, Watched
from nbaccel.launch.dashboard.weighing import resident
from nbaccel.launch.member import Member
from nbaccel.plan import Plan
from nbaccel.pool import messages, status
from nbaccel.pool.halting import tell
from nbaccel.pool.states import PoolState, WorkerState
from nbaccel.pool.turn import Account, Turn
from nbaccel.units import counted

__all__ = [
    "ALIVE",
    "LOST",
    "CellFollowing",
    "anew",
    "status_table",
    "stays_behind",
    "stopped",
    "unknown",
    "why_lost",
]

ALIVE = "The workers live on, with all their variables."
REGROUPED = (
    "Their process groups were ended, since ranks were waiting in them; the next collective makes "
    "new ones. DDP models and Accelerators go on with these by themselves; run the cells again "
    "that build what else holds one (a DeepSpeed engine, FSDP2, dist.new_group)."
)
UNEVEN = (
    "the ranks have called different numbers of collectives in this cell, so their process groups "
    "were ended: the next collective would have met the wrong partner. DDP models and Accelerators "
    "go on in new ones by themselves; run the cells again that build what else holds one (a "
    "DeepSpeed engine, FSDP2, dist.new_group)."
)
LOST = (
    "All workers have been ended, and their variables are lost. The next cell starts new ones. The "
    "notebook's own variables and models are as they were before this cell."
)


def _left(account: Account) -> str:
    """What is left after a turn that ended badly."""
    if account.lost:
        return LOST
    in_groups = any(idle.in_groups for idle in account.idle.values())
    return f"{ALIVE} {REGROUPED}" if account.out_of_step and in_groups else ALIVE


def closing(account: Account, unsendable: Mapping[str, str]) -> str:
    """The last words of an obituary: what is left, and why a name was not there.

    Args:
        account: What became of the turn.
        unsendable: Names of the notebook that could not be sent, with why.
    """
    said = [m.record.raised.message for m in account.members if m.record and m.record.raised]
    lines = [
        f"The notebook has {name!r}, but it cannot be sent to the workers: {why}"
        for name, why in unsendable.items()
        if any(f"name {name!r} is not defined" in text for text in said)
    ]
    return "\n".join([*lines, _left(account)])


def why_lost(account: Account) -> str:
    """In one clause, why a pool is broken."""
    if account.remark:
        return account.remark[:1].lower() + account.remark[1:].rstrip(".")
    records = [m.record for m in account.members if m.record is not None and m.rank in account.lost]
    if not records:
        return "a worker was lost"
    cause = failure.first_cause(records)
    if cause.exit_status is None:
        return f"rank {cause.rank} did not answer an interrupt and had to be ended"
    return f"rank {cause.rank} {failure.name_exit(cause.exit_status)}"


def anew(num_processes: int, reason: str) -> str:
    """The line that says that new workers are started."""
    return (
        f"nbaccel: {counted(num_processes, 'new worker')} started, because {reason}; what the "
        "cells before had defined in them is gone.\n"
    )


def stopped(account: Account) -> str:
    """What a Stop has ended with."""
    lines = ["the cell was stopped."]
    for member in account.members:
        record = member.record
        if record is not None and record.doing:
            lines.append(f"  rank {member.rank} {record.doing}")
        elif member.returned is not None:
            lines.append(f"  rank {member.rank} was through with it")
    lines.append(_left(account))
    return "\n".join(lines)


def on_the_way(paths: Sequence[str]) -> str:
    """What became of weights when the workers failed after the cell had ended.

    Args:
        paths: The modules, as the user would write them.
    """
    names = " and ".join([", ".join(paths[:-1]), paths[-1]] if len(paths) > 1 else paths)
    return (
        f"This was after the cell, while the weights that it trained in {names} were written back: "
        f"in the notebook {names} {'are' if len(paths) > 1 else 'is'} as before the cell, all of "
        "the weights old and none new."
    )


def left_behind(account: Account) -> str:
    """What became of weights when the workers failed before these were written."""
    said = "This was after the cell, while its process groups were ended."
    if any(idle.dirty for idle in account.idle.values()):
        said += " The weights that it trained were not written back."
    return said


def after_cell(account: Account, told: str) -> str:
    """The last words of a report about what followed a cell.

    Args:
        account: What became of the turn.
        told: What is known of the weights.
    """
    if not account.lost:
        told += (
            " The workers live on and have the trained weights: remove the cause, and the next "
            "cell writes them back."
        )
        return told
    lost = (
        "All workers have been ended, and their variables are lost. The next cell starts new ones."
    )
    return "\n".join([told, *([account.remark] if account.remark else []), lost])


def no_room(told: str, error: OSError | None) -> str:
    """What is said when the notebook's own process could not take the weights.

    Args:
        told: What is known of the weights.
        error: What it could not do.
    """
    why = error.strerror if error is not None and error.strerror else str(error)
    return (
        f"The notebook has no room for the trained weights: {why}. {told} The workers live on and "
        "have the trained weights: close what holds memory or files open, and the next cell "
        "writes them back."
    )


def raise_first(failed: BaseException | None, trouble: BaseException | None) -> None:
    """Raise what a cell ended with; what went wrong afterwards is written out if both are there."""
    __tracebackhide__ = True
    if failed is None:
        failed, trouble = trouble, None
    if trouble is not None:
        sys.stderr.write(f"nbaccel: {trouble}\n")
    if failed is not None:
        raise failed


def unknown(missing: Sequence[str], known: Iterable[str], *, where: str) -> str:
    """Which names are not there, and which ones were probably meant."""
    if not missing:
        return f"No name was given: say which names of {where} are meant, for example loss."
    names = [name for name in known if not name.startswith("_")]
    lines = [f"{where} has no name {name!r}.{closest(name, names)}" for name in missing]
    return " ".join(lines)


def stays_behind(path: str, why: str) -> str:
    """The line about weights that cannot come home."""
    return (
        f"nbaccel: the weights of {path} stay in the workers, because they no longer fit the "
        f"notebook's module ({why}). Pull what you need, for example its state_dict.\n"
    )


def came_changed(path: str, what: str) -> str:
    """The line about weights that are not in the notebook as they are in the workers."""
    return (
        f"nbaccel: the weights of {path} were copied into the notebook's module, but are not as "
        f"they are in the worker: {what}. Pull what you need, for example its state_dict.\n"
    )


class CellFollowing(Following):
    """The dashboard of a cell, or of a call in live workers: it also tells where each rank is.

    Args:
        ranks: The ranks that have the task.
        device: What the workers compute on.
    """

    def __init__(self, ranks: Sequence[int], *, device: str) -> None:
        super().__init__(ranks, device=device, always=True)

    def row(
        self, watched: Watched, member: Member, *, last_line: str, device_bytes: int | None
    ) -> status.RankStatus:
        """One rank, as it is now, with what it is doing."""
        turn = cast("Turn", watched)
        place = turn.account.places.get(member.rank)
        is_open = member.rank in turn.open
        found = rank_status(member, turn.seconds, place, is_open=is_open)
        return replace(
            found,
            state=found.state if is_open else _how_it_is_through(member),
            device_bytes=found.device_bytes if device_bytes is None else device_bytes,
            last_line=last_line,
        )

    def looked(self, watched: Watched) -> None:
        """Ask the ranks where they are, for the next time."""
        turn = cast("Turn", watched)
        for member in turn.account.members:
            if member.rank in turn.open:
                tell(member, messages.Look())


def _how_it_is_through(member: Member) -> str:
    if member.has_ended:
        return "gone"
    if member.record is None:
        return "done"
    return "stopped" if member.record.doing else "failed"


def rank_status(
    member: Member, seconds: float, place: messages.Whereabouts | None, *, is_open: bool
) -> status.RankStatus:
    """One worker, as the status tells it."""
    state = WorkerState.GONE if member.has_ended else WorkerState.IDLE
    if is_open:
        state = WorkerState.STOPPING if member.told else WorkerState.RUNNING
    doing = failure.doing(place.stack) if is_open and place is not None and place.stack else ""
    return status.RankStatus(
        rank=member.rank,
        state=state.name.lower(),
        seconds=seconds,
        rss_bytes=resident(member.pid),
        device_bytes=place.device_bytes if place is not None else None,
        doing=doing,
    )


def status_table(
    state: PoolState,
    reason: str,
    plan: Plan,
    members: Sequence[Member],
    places: Mapping[int, messages.Whereabouts],
) -> status.StatusTable:
    """The pool as `%accelerate status` shows it."""
    now = time.monotonic()
    rows = [
        rank_status(m, now - m.since, places.get(m.rank), is_open=state is PoolState.RUNNING)
        for m in members
    ]
    told = f": {reason}" if reason else ""
    workers = plan.headline() if members else f"The next cell starts {plan.headline()}"
    headline = f"{state.name.lower()}{told}. {workers}"
    return status.StatusTable(rows, headline=headline)
