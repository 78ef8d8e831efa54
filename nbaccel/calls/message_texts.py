"""Messages of a pool: about a cell that failed, about the pool, and while a cell runs."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from nbaccel.base.units import count_noun, first_few, format_bytes, format_seconds, number_ranges
from nbaccel.calls.outcome import CallResult
from nbaccel.calls.pool_planning import PoolState, WorkerState
from nbaccel.calls.supervisor import Supervisor
from nbaccel.config.mistakes import closest
from nbaccel.output.cell_place import CellPlace
from nbaccel.output.panel.facts import RankStatus
from nbaccel.output.panel.following import DashboardUpdater, WatchedCall, resident
from nbaccel.plan import Plan
from nbaccel.workers import failure, messaging
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.template import template_for
from nbaccel.workers.worker_handle import WorkerHandle

__all__ = [
    "POOL_LOST",
    "STILL_ALIVE",
    "CellDashboardUpdater",
    "RankStatus",
    "StatusTable",
    "regrouped_line",
    "status_table",
    "stays_behind",
    "stopped_message",
    "unknown_names_message",
    "why_lost",
]


STILL_ALIVE = "The workers live on, with all their variables."
REGROUPED_WORDS = (
    "Their process groups were ended, since ranks were waiting in them; the next collective "
    "makes new ones. DDP models and Accelerators go on with these by themselves; run the cells "
    "again that build what else holds one (a DeepSpeed engine, FSDP2, dist.new_group)."
)
UNEVEN_COLLECTIVES = (
    "the ranks have called different numbers of collectives in this cell, so their process groups "
    "were ended: the next collective would have met the wrong partner. DDP models and Accelerators "
    "go on in new ones by themselves; run the cells again that build what else holds one (a "
    "DeepSpeed engine, FSDP2, dist.new_group)."
)
POOL_LOST = (
    "All workers have been ended, and their variables are lost. The next cell starts new ones. "
    "The notebook's own variables and models are as they were before this cell."
)


def _still_running(result: CallResult) -> str:
    """What is left after a task that failed."""
    if result.lost:
        return POOL_LOST
    in_groups = any(answer.in_groups for answer in result.idle.values())
    return f"{STILL_ALIVE} {REGROUPED_WORDS}" if result.out_of_step and in_groups else STILL_ALIVE


def closing_lines(call_result: CallResult, unsendable_reason: Mapping[str, str]) -> str:
    """The closing lines of a failure report: what is left, and why a name was missing."""
    missing_names = {
        member.record.raised.missing_name
        for member in call_result.members
        if member.record and member.record.raised
    }
    message_lines = [
        f"The notebook has {unknown_name!r}, but it cannot be sent to the workers: {stay_reason}"
        for unknown_name, stay_reason in unsendable_reason.items()
        if unknown_name in missing_names
    ]
    return "\n".join([*message_lines, _still_running(call_result)])


def why_lost(call_result: CallResult) -> str:
    """In one clause, why a pool is broken."""
    if call_result.lost_because:
        return failure.as_clause(call_result.lost_because)
    records = [
        member.record
        for member in call_result.members
        if member.record is not None and member.rank in call_result.lost
    ]
    if not records:
        return "a worker was lost"
    first_failure = failure.first_cause(records)
    if first_failure.exit_status is None:
        return f"rank {first_failure.rank} did not answer an interrupt and had to be ended"
    return f"rank {first_failure.rank} {failure.name_exit(first_failure.exit_status)}"


def regrouped_line(num_processes: int, end_reason: str) -> str:
    """The line that says that new workers are started."""
    return (
        f"nbaccel: {count_noun(num_processes, 'new worker')} started, because {end_reason}; what "
        "the cells before had defined in them is gone.\n"
    )


def stopped_message(call_result: CallResult) -> str:
    """What a Stop has ended with."""
    lines = ["the cell was stopped."]
    for member in call_result.members:
        record = member.record
        if record is not None and record.doing:
            lines.append(f"  rank {member.rank} {record.doing}")
        elif member.returned is not None:
            lines.append(f"  rank {member.rank} was through with it")
    lines.append(_still_running(call_result))
    return "\n".join(lines)


def on_the_way(module_paths: Sequence[str]) -> str:
    """What happened to the weights when the workers failed after the cell had ended."""
    name_list = " and ".join(
        [", ".join(module_paths[:-1]), module_paths[-1]] if len(module_paths) > 1 else module_paths
    )
    return (
        f"This was after the cell, while the weights that it trained in {name_list} were written "
        f"back: in the notebook {name_list} {'are' if len(module_paths) > 1 else 'is'} as before "
        "the cell, all of the weights old and none new."
    )


def left_behind(call_result: CallResult) -> str:
    """What happened to the weights when the workers failed before these were written."""
    words = "This was after the cell, while its process groups were ended."
    if any(answer.dirty for answer in call_result.idle.values()):
        words += " The weights that it trained were not written back."
    return words


def after_cell(call_result: CallResult, told_lines: str) -> str:
    """The closing lines of a report about what followed a cell."""
    if not call_result.lost:
        told_lines += (
            " The workers live on and have the trained weights: remove the cause, and the next "
            "cell writes them back."
        )
        return told_lines
    models = (
        "All workers have been ended, and their variables are lost. The next cell starts new ones."
    )
    return "\n".join(
        [told_lines, *([call_result.lost_because] if call_result.lost_because else []), models]
    )


def after_call(call_result: CallResult) -> tuple[str, str]:
    """What a Stop and a failure of a call in live workers say at their end."""
    if call_result.lost:
        return (
            "the call was stopped, and the workers were ended; the model is as it was",
            "The notebook's model is as it was before the call; all workers have been ended, and "
            "their variables are lost. The next cell starts new ones.",
        )
    return (
        "the call was stopped; the model is as it was, and the workers live on",
        "The notebook's model is as it was before the call; the workers live on.",
    )


def no_room(told_lines: str, raised_error: OSError) -> str:
    """The message when the notebook's own process could not take the weights."""
    reason = raised_error.strerror or raised_error
    return (
        f"The notebook has no room for the trained weights: {reason}. {told_lines} The "
        "workers live on and have the trained weights: close what holds memory or files open, "
        "and the next cell writes them back."
    )


def raise_first(failed_error: BaseException | None, task_trouble: BaseException | None) -> None:
    """Raise the error of a cell; if there is one of what followed as well, print that."""
    __tracebackhide__ = True
    if failed_error is None:
        failed_error = task_trouble
        task_trouble = None
    if task_trouble is not None:
        sys.stderr.write(f"nbaccel: {task_trouble}\n")
    if failed_error is not None:
        raise failed_error


def unknown_names_message(
    missing_names: Sequence[str], known_names: Iterable[str], *, namespace_words: str
) -> str:
    """Which names are not there, and which ones were probably meant."""
    if not missing_names:
        return (
            f"No name was given: say which names of {namespace_words} are meant, for example loss."
        )
    name_list = [unknown_name for unknown_name in known_names if not unknown_name.startswith("_")]
    lines = [
        f"{namespace_words} has no name {unknown_name!r}.{closest(unknown_name, name_list)}"
        for unknown_name in missing_names
    ]
    return " ".join(lines)


def stays_behind(module_path: str, stay_reason: str) -> str:
    """The line about weights that cannot be copied back."""
    return (
        f"nbaccel: the weights of {module_path} stay in the workers, because they no longer fit "
        f"the notebook's module ({stay_reason}). Pull what you need, for example its "
        "state_dict.\n"
    )


def came_changed(module_path: str, change_words: str) -> str:
    """The line about weights that are not in the notebook as they are in the workers."""
    return (
        f"nbaccel: the weights of {module_path} were copied into the notebook's module, but are "
        f"not as they are in the worker: {change_words}. Pull what you need, for example its "
        "state_dict.\n"
    )


class CellDashboardUpdater(DashboardUpdater):
    """The dashboard of a cell, or of a call in live workers: it also shows where each rank is."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        place: CellPlace,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(ranks, plan=plan, place=place, always_shown=True)
        self._on_poll = on_poll

    def row(
        self,
        watched_worker: WatchedCall,
        member: WorkerHandle,
        *,
        last_line: str,
        device_bytes: int | None,
    ) -> RankStatus:
        """One rank, as it is now, with what it is doing."""
        # DashboardUpdater is given the supervisor itself, as a `WatchedCall`.
        task = cast("Supervisor", watched_worker)
        is_open = member.rank in task.open
        values = rank_status(member, task.seconds, member.whereabouts, is_open=is_open)
        return replace(
            values,
            # A rank that has finished is idle; how it finished is of more interest.
            state=values.state if is_open else _how_it_is_through(member),
            device_bytes=values.device_bytes if device_bytes is None else device_bytes,
            last_line=last_line,
        )

    def ask_ranks(self, watched_worker: WatchedCall) -> None:
        """Ask the ranks where they are, for the next time."""
        if self._on_poll is not None:
            self._on_poll()
        task = cast("Supervisor", watched_worker)
        for member in task.at_work():
            if member.rank in task.open:
                member.ask_where()


def _how_it_is_through(member: WorkerHandle) -> str:
    if member.has_ended:
        return "gone"
    if member.record is None:
        return "done"
    return "stopped" if member.record.was_stopped else "failed"


def rank_status(
    member: WorkerHandle,
    state_seconds: float,
    rank_place: messaging.Whereabouts | None,
    *,
    is_open: bool,
    is_gone: bool = False,
) -> RankStatus:
    """One row of the status table."""
    rank_state = WorkerState.GONE if member.has_ended or is_gone else WorkerState.IDLE
    if is_open and not is_gone:
        rank_state = WorkerState.STOPPING if member.is_stopped else WorkerState.RUNNING
    activity_words = (
        str(RankActivity.of_stack(rank_place.stack))
        if is_open and rank_place and rank_place.stack
        else ""
    )
    return RankStatus(
        rank=member.rank,
        state=rank_state.name.lower(),
        seconds=state_seconds,
        rss_bytes=resident(member),
        device_bytes=rank_place.device_bytes if rank_place is not None else None,
        doing=activity_words,
        names=rank_place.names if rank_place is not None else (),
        group=rank_place.group if rank_place is not None else "",
    )


def status_table(
    pool_state: PoolState, end_reason: str, plan: Plan, rows: Sequence[RankStatus], activity: str
) -> StatusTable:
    """The pool as `%accelerate status` shows it."""
    ended_ranks = [row.rank for row in rows if row.state == WorkerState.GONE.name.lower()]
    told_reason = f": {end_reason}" if end_reason else ""
    if activity and pool_state is PoolState.RUNNING:
        told_reason = f" {activity}"
    elif ended_ranks and pool_state is PoolState.IDLE:
        told_reason = (
            f", but {_ended_words(ended_ranks)}: the next cell tells why, and the one after that "
            "starts new workers"
        )
    worker_words = plan.headline() if rows else f"The next cell starts {plan.headline()}"
    left_out = template_for(plan.device).left_out_text()
    headline = f"{pool_state.name.lower()}{told_reason}. {worker_words} {left_out}".rstrip()
    return StatusTable(rows, headline=headline)


def _ended_words(ranks: Sequence[int]) -> str:
    """`rank 1 has ended`, `ranks 0-3 have ended`."""
    numbers = number_ranges(ranks)
    return f"rank {numbers} has ended" if len(ranks) == 1 else f"ranks {numbers} have ended"


# No colour is named, and the background shows through: it reads on light and dark alike.
_STATUS_CELL_STYLE = "text-align:left;padding:0.2em 1.2em 0.2em 0;border:none;background:none"


class StatusTable:
    """The ranks as a table, in a notebook and as text."""

    def __init__(self, rows: Sequence[RankStatus], *, headline: str = "") -> None:
        self.rows = tuple(rows)
        self.headline = headline

    def under(self, headline: str) -> StatusTable:
        """The same ranks below another line."""
        return StatusTable(self.rows, headline=headline)

    def _cells(self) -> list[list[str]]:
        # A column without a value for any rank would only take space.
        columns = [
            (word, of)
            for word, of in _STATUS_COLUMNS
            if word in _LASTING_COLUMNS or any(map(of, self.rows))
        ]
        return [
            [word for word, _ in columns],
            *([of(row) or _NO_VALUES.get(word, "-") for word, of in columns] for row in self.rows),
        ]

    def __str__(self) -> str:
        text_cells = self._cells() if self.rows else []
        column_widths = [max(map(len, column)) for column in zip(*text_cells, strict=True)]
        message_lines = [
            "  ".join(map(str.ljust, table_line, column_widths)).rstrip()
            for table_line in text_cells
        ]
        return "\n".join([self.headline, *message_lines] if self.headline else message_lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headline_html = f"<div>{html.escape(self.headline)}</div>" if self.headline else ""
        if not self.rows:
            return headline_html
        head_row, *body_rows = self._cells()
        head_html = "".join(
            f'<th style="{_STATUS_CELL_STYLE};opacity:0.6">{html.escape(cell_text)}</th>'
            for cell_text in head_row
        )
        row_html = (
            "<tr>"
            + "".join(
                f'<td style="{_STATUS_CELL_STYLE}">{html.escape(cell_text)}</td>'
                for cell_text in table_line
            )
            + "</tr>"
            for table_line in body_rows
        )
        return headline_html + (
            f'<table style="border:none;margin:0"><thead><tr '
            f'style="background:none">{head_html}</tr></thead><tbody>{"".join(row_html)}</tbody></table>'
        )


def _device_words(row: RankStatus) -> str:
    return "" if row.device_bytes is None else format_bytes(row.device_bytes)


def _duration_words(row: RankStatus) -> str:
    """How long it has been in its state; of one that waits in whole minutes, without haste.

    A board that counted the seconds of workers that do nothing would change all the time.
    """
    if row.state == WorkerState.GONE.name.lower():
        return ""  # when it ended has not been seen
    if row.state != WorkerState.IDLE.name.lower():
        return format_seconds(row.seconds)
    if row.seconds < _MINUTE_S:
        return "under 1 min"
    hours, minutes = divmod(int(row.seconds // _MINUTE_S), 60)
    return f"{hours} h" if hours else f"{minutes} min"


_STATUS_COLUMNS: tuple[tuple[str, Callable[[RankStatus], str]], ...] = (
    ("rank", lambda row: str(row.rank)),
    ("state", lambda row: row.state),
    ("for", _duration_words),
    ("memory", lambda row: format_bytes(row.rss_bytes) if row.rss_bytes else ""),
    ("on device", _device_words),
    ("group", lambda row: row.group),
    ("names", lambda row: first_few(row.names, _MAX_TOLD_NAMES)),
    ("doing", lambda row: row.doing),
)
_LASTING_COLUMNS = ("rank", "state", "for", "memory", "doing")
_NO_VALUES = {"doing": ""}
_MAX_TOLD_NAMES = 6
_MINUTE_S = 60
