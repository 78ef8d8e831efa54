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


def unwrap_error(error: BaseException) -> WrappedError | None:
    """Take apart what torch has raised for another process or thread."""
    wrapper = _torch_wrapper(error.__traceback__)
    if wrapper is None or not library_texts.was_reraised_by_torch(error, wrapper.exc_type):
        return None
    blocks = _TRACEBACK_BLOCK.split(wrapper.exc_msg)
    if len(blocks) < 2:
        return None
    # The last block, because the causes of an error come before it.
    lines = blocks[-1].rstrip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return WrappedError(
        kind=wrapper.exc_type,
        message=_without_type("\n".join(lines[end:]), wrapper.exc_type),
        frames=tuple(
            Frame(file=match["file"], line=int(match["line"]), function=match["function"])
            for match in map(_TRACEBACK_FRAME.match, lines[:end])
            if match
        ),
        where=wrapper.where,
    )


def _torch_wrapper(traceback: TracebackType | None) -> Any:
    """The wrapper whose `reraise` is the innermost call."""
    # Without torch there is no wrapper to find, and importing it takes seconds.
    if traceback is None or "torch" not in sys.modules:
        return None
    from nbaccel.base import torch_private

    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    holder = traceback.tb_frame.f_locals.get("self")
    return holder if torch_private.is_exception_wrapper(holder) else None


def _without_type(text: str, kind: type[BaseException]) -> str:
    """`ValueError: bad` → `bad`."""
    name, _, message = text.partition(": ")
    return message if name.rpartition(".")[2] == kind.__name__ else text.removeprefix(name)
