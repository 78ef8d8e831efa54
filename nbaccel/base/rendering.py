"""How errors look in a notebook: what happened, and the user's own lines.

IPython uses an exception's `_render_traceback_`, if it has one, instead of a full traceback, which
here would be mostly frames of nbaccel.
"""

from __future__ import annotations

import re
import textwrap

from nbaccel.base import frames

_ANSI_RED = "\x1b[31m"
_ANSI_BOLD = "\x1b[1m"
_ANSI_GREEN = "\x1b[32m"
_ANSI_OFF = "\x1b[39;49;00m"
_MESSAGE_LINE_CHARS = 100
_SOURCE_LINE = re.compile(r"^  (---->|     ) ")
_ARROW_LINE = re.compile(r"^  ---->")
_FILE_LINE = re.compile(r'^  File "(.+)", line \d+', re.MULTILINE)
_PLACE_LINE = re.compile(r"^  (?P<place>.+, line \d+|\S+:\d+)(?P<rest>, in .+)$")
_TRACEBACK_COMMAND = "import sys; print(sys.last_value.__cause__)"
_NO_DEBUGGER_HINT = (
    "%debug cannot enter a worker: run the function with num_processes=1, or the cell without "
    "%%accelerate, and it can."
)


def render_mistake(error: BaseException) -> list[str]:
    """An error whose reason is in the cell: the user's frames, then the text."""
    user_frames = [f for f in frames.of_traceback(error.__traceback__) if not f.is_library]
    # What `%%time` compiles has no lines: IPython 7 shows its errors without the cell's own frame.
    user_frames = [frame for frame in user_frames if not frame.file.startswith("<timed ")]
    lines: list[str] = []
    for frame in user_frames[-4:]:
        function_text = "" if frame.function == frames.MODULE_LEVEL else f", in {frame.function}"
        lines.append(f"  {_ANSI_GREEN}{frames.place(frame)}{_ANSI_OFF}{function_text}")
        lines += map(coloured, frames.source(frame, num_around=0))
    return [*lines, *_render_error_text(error)]


def render_failure(error: BaseException) -> list[str]:
    """An error whose reason is in another process: the text has the frames that matter."""
    lines = _render_error_text(error)
    user_frames = [
        frame for frame in frames.of_traceback(error.__traceback__) if not frame.is_library
    ]
    # Launched from a function of the user's, which the cell alone does not show.
    if len(user_frames) > 1:
        lines.append(f"Launched at {' → '.join(map(frames.place, user_frames))}.")
    # Offered only where it has more frames than the message shows.
    shown_frames = sum("---->" in line for line in lines)
    if len(_foreign_files(str(error.__cause__))) > shown_frames:
        command = "%accelerate traceback" if frames.has_magic("accelerate") else _TRACEBACK_COMMAND
        lines.append(f"The whole traceback: {command}")
    if error.__cause__ is not None:
        lines.append(_NO_DEBUGGER_HINT)
    return lines


def _foreign_files(text: str) -> list[str]:
    """The file of each frame that is not nbaccel's own."""
    file_names = _FILE_LINE.findall(text)
    return [
        file_name
        for file_name in file_names
        if not frames.Frame(file=file_name, line=0, function="").is_house
    ]


def _render_error_text(error: BaseException) -> list[str]:
    """The class and the text, coloured, in lines that a cell's width does not break in a word."""
    name = type(error).__name__
    first_line, *other_lines = f"{name}: {error}".rstrip(": ").split("\n")
    first_wrapped, *more_wrapped = _wrap_line(first_line)
    lines = [
        f"{_ANSI_BOLD}{_ANSI_RED}{name}{_ANSI_OFF}{first_wrapped[len(name) :]}",
        *more_wrapped,
    ]
    for line in other_lines:
        lines += [coloured(line)] if _SOURCE_LINE.match(line) else map(coloured, _wrap_line(line))
    return lines


def _wrap_line(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line,
        _MESSAGE_LINE_CHARS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        # textwrap makes no line at all of an empty one.
    ) or [""]


def coloured(text: str, *, stands_out: bool = False) -> str:
    """A line as it is shown: places green, the arrow and what stands out red."""
    if stands_out:
        return f"{_ANSI_BOLD}{_ANSI_RED}{text}{_ANSI_OFF}"
    if _ARROW_LINE.match(text):
        arrow = text[:7]
        code = text[7:]
        return f"{_ANSI_BOLD}{_ANSI_RED}{arrow}{_ANSI_OFF}{_ANSI_BOLD}{code}{_ANSI_OFF}"
    place_match = _PLACE_LINE.match(text)
    if place_match:
        return f"  {_ANSI_GREEN}{place_match['place']}{_ANSI_OFF}{place_match['rest']}"
    return text
