r"""Errors of DataLoader workers, which torch raises again with their traceback as text.

    DataLoader worker    KeyError('x') ─► ExceptionWrapper: its class, its traceback as text
    rank                 KeyError("Caught KeyError in DataLoader worker process 0.\nOriginal ...")

Here they are taken apart again: class, message and frames are those of the original. (The class
too: torch raises RuntimeError for one that cannot be made from a text.)
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nbaccel.frames import Frame

__all__ = ["Wrapped", "unwrap"]

_BLOCK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """What an exception was in the process that it comes from."""

    kind: type[BaseException]
    message: str
    frames: tuple[Frame, ...]
    where: str
    """Such as `in DataLoader worker process 0`."""


def unwrap(error: BaseException) -> Wrapped | None:
    """Take apart what torch has raised for another process or thread.

    Args:
        error: Any exception.

    Returns:
        The original; None if it is none of these, or has a form that is not known.
    """
    wrapper = _wrapper(error.__traceback__)
    if wrapper is None or not str(error).startswith(f"Caught {wrapper.exc_type.__name__} "):
        return None
    blocks = _BLOCK.split(wrapper.exc_msg)
    if len(blocks) < 2:
        return None
    lines = blocks[-1].rstrip("\n").split("\n")
    end = next((at for at, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    found = (_FRAME.match(line) for line in lines[:end])
    return Wrapped(
        kind=wrapper.exc_type,
        message=_without_type("\n".join(lines[end:]), wrapper.exc_type),
        frames=tuple(
            Frame(file=m["file"], line=int(m["line"]), function=m["function"]) for m in found if m
        ),
        where=wrapper.where,
    )


def _wrapper(tb: TracebackType | None) -> Any:
    """The wrapper whose `reraise` is the innermost call."""
    module = sys.modules.get("torch._utils")
    if tb is None or module is None:
        return None
    while tb.tb_next is not None:
        tb = tb.tb_next
    found = tb.tb_frame.f_locals.get("self")
    return found if isinstance(found, module.ExceptionWrapper) else None


def _without_type(text: str, kind: type[BaseException]) -> str:
    """`ValueError: bad` → `bad`."""
    name, _, message = text.partition(": ")
    return message if name.rpartition(".")[2] == kind.__name__ else text.removeprefix(name)
