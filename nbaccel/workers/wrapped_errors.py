r"""Errors that torch raises again for another process or thread, taken apart.

    DataLoader worker    KeyError('x') ─► ExceptionWrapper: its class, its traceback as text
    rank                 KeyError("Caught KeyError in DataLoader worker process 0.\nOriginal ...")

Class, message and frames are those of the original. (The class too: torch raises RuntimeError for
one that cannot be made from a text.)
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nbaccel.base.frames import Frame
from nbaccel.workers import library_texts

__all__ = ["WrappedError", "unwrap_error"]


_TRACEBACK_BLOCK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)
_TRACEBACK_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedError:
    """What an exception was in the process that it comes from."""

    kind: type[BaseException]
    message: str
    frames: tuple[Frame, ...]
    where: str
    """Such as `in DataLoader worker process 0`."""


def unwrap_error(raised_error: BaseException) -> WrappedError | None:
    """Take apart what torch has raised for another process or thread."""
    torch_wrapper = _torch_wrapper(raised_error.__traceback__)
    if torch_wrapper is None or not library_texts.was_reraised_by_torch(
        raised_error, torch_wrapper.exc_type
    ):
        return None
    traceback_blocks = _TRACEBACK_BLOCK.split(torch_wrapper.exc_msg)
    if len(traceback_blocks) < 2:
        return None
    # The last block, because the causes of an error come before it.
    original_lines = traceback_blocks[-1].rstrip("\n").split("\n")
    frames_end = next(
        (
            line_index
            for line_index, text_line in enumerate(original_lines)
            if not text_line.startswith("  ")
        ),
        len(original_lines),
    )
    frame_matches = (_TRACEBACK_FRAME.match(text_line) for text_line in original_lines[:frames_end])
    return WrappedError(
        kind=torch_wrapper.exc_type,
        message=_without_type("\n".join(original_lines[frames_end:]), torch_wrapper.exc_type),
        frames=tuple(
            Frame(
                file=frame_match["file"],
                line=int(frame_match["line"]),
                function=frame_match["function"],
            )
            for frame_match in frame_matches
            if frame_match
        ),
        where=torch_wrapper.where,
    )


def _torch_wrapper(entry: TracebackType | None) -> Any:
    """The wrapper whose `reraise` is the innermost call."""
    # Without torch there is no wrapper to find, and importing it takes seconds.
    if entry is None or "torch" not in sys.modules:
        return None
    from nbaccel.base import torch_private

    while entry.tb_next is not None:
        entry = entry.tb_next
    holder = entry.tb_frame.f_locals.get("self")
    return holder if torch_private.is_exception_wrapper(holder) else None


def _without_type(error_text: str, error_class: type[BaseException]) -> str:
    """`ValueError: bad` → `bad`."""
    name, _, message = error_text.partition(": ")
    return (
        message
        if name.rpartition(".")[2] == error_class.__name__
        else error_text.removeprefix(name)
    )
