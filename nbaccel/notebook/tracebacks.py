"""`%accelerate traceback`: all that is known of the last failed launch or cell, rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nbaccel import frames
from nbaccel.launch.failure import Raised, Record
from nbaccel.rendering import coloured

__all__ = ["told"]

_Line = tuple[str, bool]
"""Its text, and whether it stands out."""
_AROUND = 2  # source lines before and after that of a frame which is the user's own


def told(records: Sequence[Record], *, colours: bool) -> str:
    """The whole tracebacks.

    Args:
        records: What is known of each rank, in order of time.
        colours: Whether the text is coloured (ANSI).

    Returns:
        The text: first the rank that failed first.
    """
    lines = [line for record in records for line in (*_of_rank(record), ("", False))][:-1]
    return "\n".join(coloured(text, bold=bold) if colours else text for text, bold in lines)


def _of_rank(record: Record) -> Iterator[_Line]:
    yield f"rank {record.rank}:", True
    if record.raised is not None:
        yield from _of_error(record.raised)
        return
    if record.stack:
        yield "Stack (most recent call last):", False
    yield from _of_frames(reversed(record.stack))
    yield record.headline, True


def _of_error(raised: Raised) -> Iterator[_Line]:
    if raised.cause is not None:
        yield from _of_error(raised.cause)
        yield from (("", False), ("which led to:", False), ("", False))
    yield "Traceback (most recent call last):", False
    yield from _of_frames(raised.frames)
    first, *rest = raised.message.split("\n")
    yield f"{raised.type_name}: {first}".rstrip(": "), True
    yield from ((line, False) for line in (*rest, *raised.notes))
    for number, part in enumerate(raised.parts, 1):
        yield f"which has, as number {number}:", False
        yield from ((f"  {text}", bold) for text, bold in _of_error(part))


def _of_frames(stack: Iterable[frames.Frame]) -> Iterator[_Line]:
    for frame in stack:
        yield f"  {frames.place(frame)}, in {frame.function}", False
        around = 0 if frame.is_library else _AROUND
        yield from ((line, False) for line in frames.source(frame, around=around))
