"""A line below a notebook's own error that has to do with the workers; `%accelerate traceback`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbaccel.base import frames
from nbaccel.base.errors import WorkerFailed
from nbaccel.base.frames import coloured
from nbaccel.base.log import write_notice
from nbaccel.notebook.session import Session
from nbaccel.workers.failure import FailureRecord, RaisedError


def hint_after_cells(session: Session) -> Callable[[], None]:
    """Look at each cell's error after IPython has shown it; returns what ends that."""
    events = session.shell.events

    def on_cell_end(result: Any = None) -> None:
        error = getattr(result, "error_in_exec", None)
        # Kernel and engines do not know each other's names: ipython/ipyparallel#897. A failed cell
        # of workers raises an error of both classes; there a worker lacks the name.
        if not isinstance(error, NameError) or isinstance(error, WorkerFailed):
            return
        name = getattr(error, "name", None)
        pool = session.living_pool
        if name and name not in session.shell.user_ns and pool is not None and pool.inspect(name):
            write_notice(
                f"nbaccel: {name} exists in the workers of %%accelerate. To copy it "
                f"here: %accelerate pull {name}\n"
            )

    events.register("post_run_cell", on_cell_end)
    return lambda: events.unregister("post_run_cell", on_cell_end)


_Line = tuple[str, bool]
"""Its text, and whether it stands out."""
_LINES_AROUND = 2  # source lines before and after that of a frame which is the user's own


def failure_text(failure_records: Sequence[FailureRecord], *, with_colours: bool) -> str:
    """The whole tracebacks."""
    report_lines = [
        report_line
        for failure_record in failure_records
        for report_line in (*_of_rank(failure_record), ("", False))
    ][:-1]
    return "\n".join(
        coloured(text, stands_out=is_bold) if with_colours else text
        for text, is_bold in report_lines
    )


def _of_rank(record: FailureRecord) -> Iterator[_Line]:
    yield f"rank {record.rank}:", True
    if record.raised is not None:
        yield from _of_error(record.raised)
        return
    if record.stack:
        yield "Stack (most recent call last):", False
    yield from _of_frames(reversed(record.stack))
    yield record.headline, True


def _of_error(error: RaisedError) -> Iterator[_Line]:
    if error.cause is not None:
        # The cause first, as Python prints chained exceptions.
        yield from _of_error(error.cause)
        yield from (("", False), ("which led to:", False), ("", False))
    yield "Traceback (most recent call last):", False
    yield from _of_frames(error.frames)
    first_line, *other_lines = error.message.split("\n")
    yield f"{error.type_name}: {first_line}".rstrip(": "), True
    yield from ((error_line, False) for error_line in (*other_lines, *error.notes))
    for part_number, part in enumerate(error.parts, 1):
        yield f"which has, as number {part_number}:", False
        yield from ((f"  {text}", is_bold) for text, is_bold in _of_error(part))


def _of_frames(user_frames: Iterable[frames.Frame]) -> Iterator[_Line]:
    for stack_frame in user_frames:
        yield f"  {frames.place(stack_frame)}, in {stack_frame.function}", False
        # Of a library's code the failing line is enough; the user's code is what can be corrected.
        lines_around = 0 if stack_frame.is_library else _LINES_AROUND
        yield from (
            (source_line, False)
            for source_line in frames.source(stack_frame, num_around=lines_around)
        )
