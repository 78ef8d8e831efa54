"""What a process announces before a collective, and how it is told in messages."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbaccel.base import frames

__all__ = ["NOT_SEEN", "AnnouncedCall", "Entry", "describe_detail", "encode_call", "user_place"]


class Entry(NamedTuple):
    """One process's announcement, as it is exchanged: texts stay encoded until they are needed."""

    call_number: int
    call_text: bytes
    """Name and detail, as JSON. Equal bytes are equal calls."""
    place_text: bytes
    """File, line and function, as JSON."""
    data: memoryview | None = None
    """What the process gave along, in memory that stays as it is until this process's next call;
    None if it gave nothing."""

    def as_json(self) -> list[Any]:
        """The entry without its data, for the store."""
        return [self.call_number, self.call_text.decode(), self.place_text.decode()]

    @classmethod
    def from_json(cls, values: list[Any]) -> Entry:
        """What `as_json` has made."""
        number, call_text, place_text = values
        return cls(number, call_text.encode(), place_text.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedCall:
    """An entry, decoded."""

    call_number: int
    collective_name: str
    detail: Any
    frame: frames.Frame

    @classmethod
    def of(cls, entry: Entry) -> AnnouncedCall:
        """Decode an entry."""
        collective_name, detail = json.loads(entry.call_text)
        file_name, line_number, function_name = json.loads(entry.place_text)
        return cls(
            call_number=entry.call_number,
            collective_name=collective_name,
            detail=detail,
            frame=frames.Frame(file=file_name, line=line_number, function=function_name),
        )

    def describe(self) -> str:
        """Name and line of code."""
        if self.call_number < 0:
            return "not seen in any collective of nbaccel yet"
        line = frames.source_line(self.frame)
        return f"{self.collective_name}, {frames.place(self.frame)}" + (f": {line}" if line else "")


def encode_call(collective_name: str, detail: Any) -> bytes:
    """The text of a call.

    Args:
        collective_name: What is called.
        detail: JSON.
    """
    return json.dumps([collective_name, detail]).encode()


NOT_SEEN = Entry(-1, encode_call("", None), json.dumps(["", 0, ""]).encode())
"""The entry of a process that has announced nothing yet."""


def describe_detail(detail: Any) -> str:
    """The detail of a call in words: types and shapes where it lists tensors."""
    if isinstance(detail, list) and detail and isinstance(detail[0], list):
        return ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in detail)
    return str(detail)


def user_place() -> bytes:
    """File, line and function of the innermost code that is not in a library, as JSON."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to the frames above
    # The outermost frame is not tested: it is the answer where all code is in libraries.
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    return _encode_place(code.co_filename, frame.f_lineno, code.co_name)


# Both are asked for the same few places again and again.
@functools.lru_cache(maxsize=4096)
def _is_library(file_name: str) -> bool:
    return frames.Frame(file=file_name, line=0, function="").is_library


@functools.lru_cache(maxsize=1024)
def _encode_place(file_name: str, line_number: int, function_name: str) -> bytes:
    return json.dumps([file_name, line_number, function_name]).encode()
