"""Frames of code and errors, as a notebook's user knows them: `Cell In[7], line 3`, and the source.

Whether a frame is the user's own or a library's is decided by its file alone. IPython uses an
exception's `_render_traceback_`, if it has one, instead of a full traceback.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from nbaccel.base import ipython_private

MODULE_LEVEL = "<module>"
_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
_WORKER_FILE = str(_PACKAGE_FOLDER / "workers" / "worker.py")
# The names in angle brackets are those of code that libraries compile while they run.
_LIBRARY_PATH = re.compile(
    r"/(site|dist)-packages/|/lib/python3[^/]*/|<frozen |<string>|<__array_function__"
)
_CELL_NAME = re.compile(r"/ipykernel_|[</]ipython-input-")  # the latter in a terminal, and on Colab
_COUNTED_CELL_NAME = re.compile(r"[</]ipython-input-(\d+)-")
_MOST_BLANK_LINES = 4
_SOURCE_LINE_CHARS = 300
_INSTALLED_PREFIX = re.compile(r".*/(?:(?:site|dist)-packages|lib/python3[^/]*)/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    def __post_init__(self) -> None:
        if is_module(self.function):
            # Through object, because the dataclass is frozen. One name for all versions of IPython.
            object.__setattr__(self, "function", MODULE_LEVEL)

    @property
    def is_house(self) -> bool:
        """Whether it is nbaccel's own."""
        return self.file.startswith(f"{_PACKAGE_FOLDER}/")

    @property
    def is_library(self) -> bool:
        """Whether it is in an installed package, the standard library or nbaccel."""
        return self.is_house or bool(_LIBRARY_PATH.search(self.file))


def kind_name(kind: type) -> str:
    """A class as a reader knows it: with its module, except for built-in and own classes."""
    if kind.__module__ in ("builtins", "__main__", "nbaccel.errors"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_module(function: str) -> bool:
    """Whether code of this name is outside of functions, at the top level of a cell or file."""
    return function == MODULE_LEVEL or function.startswith("<cell line: ")


def of_traceback(traceback_object: TracebackType | None) -> tuple[Frame, ...]:
    """The frames of a traceback, outermost first."""
    return tuple(
        Frame(file=summary.filename, line=summary.lineno or 0, function=summary.name)
        for summary in traceback.extract_tb(traceback_object)
    )


def within_worker(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """What a worker has called, of the stack of its main thread: no frame of before its fork."""
    beginnings = (
        index
        for index, frame in enumerate(frames)
        if (frame.function, frame.file) == ("run_worker", _WORKER_FILE)
    )
    length = next(beginnings, len(frames))
    while length and frames[length - 1].is_house:
        length -= 1
    return tuple(frames[:length])


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; `frames` come innermost first."""
    return next((frame for frame in frames if not frame.is_library), None)


def caller_level() -> int:
    """The `stacklevel` of a warning that is to name the code which called nbaccel."""
    level = 0
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(f"{_PACKAGE_FOLDER}/"):
        level = level + 1
        frame = frame.f_back
    return level


def place(frame: Frame) -> str:
    """Where a frame stands, without the folders of this machine."""
    if (cell_count := cell_number(frame.file)) is not None:
        return f"Cell In[{cell_count}], line {frame.line}"
    if _CELL_NAME.search(frame.file):
        return f"a cell, line {frame.line}"
    if frame.is_house:
        return f"{Path(frame.file).relative_to(_PACKAGE_FOLDER.parent)}:{frame.line}"
    if _LIBRARY_PATH.search(frame.file):
        return f"{_INSTALLED_PREFIX.sub('', frame.file)}:{frame.line}"
    return f"{Path(frame.file).name}:{frame.line}"


def cell_number(compiled_name: str) -> int | None:
    """The number that a cell was last run under, as in `In[7]`."""
    ipython_shell = running_shell()
    compiler = getattr(ipython_shell, "compile", None)
    cell_numbers = ipython_private.cell_numbers(compiler)
    if cell_numbers is not None:
        number: Any = cell_numbers.get(compiled_name)
    elif counted_match := _COUNTED_CELL_NAME.search(compiled_name):
        number = counted_match[1]
    elif _CELL_NAME.search(compiled_name):
        number = _find_in_history(ipython_shell, compiler, compiled_name)
    else:
        number = None
    return None if number is None else int(number)


def _find_in_history(shell: Any, compiler: Any, compiled_name: str) -> int | None:
    """Before IPython 8, only the text of a cell says under which name it was compiled."""
    manager = getattr(shell, "history_manager", None)
    # A shell in a worker has no history.
    if manager is None or compiler is None:
        return None
    inputs = list(zip(manager.input_hist_raw, manager.input_hist_parsed, strict=False))
    # The newest first: a cell that was run twice is known by its last number.
    for cell_count in reversed(range(1, len(inputs))):
        raw_text, parsed_text = inputs[cell_count]
        # The history drops blank lines at the end, and the name is made from the text with them.
        for num_blank in range(_MOST_BLANK_LINES):
            lines = "\n" * num_blank
            texts = (raw_text + lines, parsed_text + lines)
            if _compiled_cell_name(compiler, cell_count, *texts) == compiled_name:
                return cell_count
    return None


@lru_cache(maxsize=1024)
def _compiled_cell_name(compiler: Any, cell_count: int, raw_text: str, parsed_text: str) -> str:
    return str(compiler.get_code_name(raw_text, parsed_text, cell_count))


def keep_lines(cells: Mapping[str, Sequence[str]]) -> None:
    """Let tracebacks of this process show the lines of code that is in no file, by its name."""
    for name, lines in cells.items():
        # No modification time, or linecache would look for the file and drop the lines.
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)


def source_line(frame: Frame) -> str:
    """The line of code a frame stands at, if its source is known here."""
    return linecache.getline(frame.file, frame.line).strip()


def source(frame: Frame, *, num_around: int) -> list[str]:
    """The frame's line with an arrow, and the lines around it; none if they are not known."""
    if not source_line(frame):
        return []
    lines = []
    for line_number in range(frame.line - num_around, frame.line + num_around + 1):
        text = linecache.getline(frame.file, line_number).rstrip()
        if text:
            line_mark = "---->" if line_number == frame.line else "     "
            lines.append(f"  {line_mark} {line_number:3d} {text[:_SOURCE_LINE_CHARS]}")
    return lines


def has_magic(magic_name: str) -> bool:
    """Whether the IPython of this process has a line magic of nbaccel's extension."""
    manager = getattr(running_shell(), "magics_manager", None)
    function = manager.magics["line"].get(magic_name) if manager is not None else None
    return getattr(function, "__module__", "").startswith("nbaccel.notebook.")


def running_shell() -> Any:
    """IPython's shell in this process, or None; IPython is not imported for it."""
    # Without it where IPython is being imported just now.
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


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
    # What `%%time` compiles has no lines: IPython 7 shows its errors without the cell's own frame.
    user_frames = [
        frame
        for frame in of_traceback(error.__traceback__)
        if not frame.is_library and not frame.file.startswith("<timed ")
    ]
    lines: list[str] = []
    for frame in user_frames[-4:]:
        function_text = "" if frame.function == MODULE_LEVEL else f", in {frame.function}"
        lines.append(f"  {_ANSI_GREEN}{place(frame)}{_ANSI_OFF}{function_text}")
        lines += map(_coloured, source(frame, num_around=0))
    return [*lines, *_render_error_text(error)]


def render_failure(error: BaseException) -> list[str]:
    """An error whose reason is in another process: the text has the frames that matter."""
    lines = _render_error_text(error)
    user_frames = [frame for frame in of_traceback(error.__traceback__) if not frame.is_library]
    # Launched from a function of the user's, which the cell alone does not show.
    if len(user_frames) > 1:
        lines.append(f"Launched at {' → '.join(map(place, user_frames))}.")
    # Offered only where it has more frames than the message shows.
    shown_frames = sum("---->" in line for line in lines)
    files = _FILE_LINE.findall(str(error.__cause__))
    if sum(not Frame(file=file, line=0, function="").is_house for file in files) > shown_frames:
        command = "%accelerate traceback" if has_magic("accelerate") else _TRACEBACK_COMMAND
        lines.append(f"The whole traceback: {command}")
    if error.__cause__ is not None:
        lines.append(_NO_DEBUGGER_HINT)
    return lines


def _render_error_text(error: BaseException) -> list[str]:
    """The class and the text, coloured, in lines that a cell's width does not break in a word."""
    name = type(error).__name__
    first_line, *other_lines = f"{name}: {error}".rstrip(": ").split("\n")
    first_wrapped, *more_wrapped = _wrap_line(first_line)
    lines = [f"{_ANSI_BOLD}{_ANSI_RED}{name}{_ANSI_OFF}{first_wrapped[len(name) :]}", *more_wrapped]
    for line in other_lines:
        lines += map(_coloured, [line] if _SOURCE_LINE.match(line) else _wrap_line(line))
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


def _coloured(text: str) -> str:
    """A line as it is shown: places green, the arrow red."""
    if _ARROW_LINE.match(text):
        return f"{_ANSI_BOLD}{_ANSI_RED}{text[:7]}{_ANSI_OFF}{_ANSI_BOLD}{text[7:]}{_ANSI_OFF}"
    return _PLACE_LINE.sub(rf"  {_ANSI_GREEN}\g<place>{_ANSI_OFF}\g<rest>", text)
