"""A notebook's cells in a worker: run, completed, explained.

IPython is imported when a worker makes its shell, and not with this file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel import frames
from nbaccel._optional import require
from nbaccel.launch import display
from nbaccel.pool.source import Source

if TYPE_CHECKING:
    from nbaccel.pool.interactive import WorkerShell

__all__ = ["CellShell", "Completions"]

_INLINE = "matplotlib_inline.backend_inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What could stand in the code from `start` to `end`."""

    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...]
    """Of each match: `function`, `instance`, …; empty where IPython cannot tell."""


class CellShell:
    """Runs cells in this process, whose `__main__` module is their namespace.

    Args:
        shell: The process's IPython shell.
    """

    def __init__(self, shell: WorkerShell) -> None:
        self._shell = shell
        self.user_ns: dict[str, Any] = shell.user_ns
        """The namespace, which persists from cell to cell."""

    @classmethod
    def create(cls, send: Callable[[Any], None], *, rank: int) -> CellShell:
        """Make this process's shell; a kernel's that came along by fork is forgotten.

        Args:
            send: Takes messages to the notebook.
            rank: This worker's rank.

        Raises:
            MissingBackend: IPython is not installed.
        """
        require("IPython", extra="notebook", why="Running cells in workers")
        from IPython.core.interactiveshell import InteractiveShell

        from nbaccel.pool.interactive import WorkerShell

        display.text_bars()
        display.forget_shells(InteractiveShell)
        display.mute_comms()
        sys.displayhook = sys.__displayhook__
        shell: WorkerShell = WorkerShell.instance(
            rank=rank, publisher=display.publisher_class(send)
        )
        warnings.formatwarning = _format_warning
        _adopt_inline_figures(shell)
        return cls(shell)

    @property
    def hidden(self) -> frozenset[str]:
        """Names in `user_ns` that IPython put there, not the user."""
        return frozenset(self._shell.user_ns_hidden) | {"__builtin__", "__builtins__"}

    def run(self, source: Source) -> dict[str, Any] | None:
        """Run a cell and return its last expression, if it ends in one.

        Args:
            source: The cell.

        Returns:
            `{"data": ..., "metadata": ...}` by media type, or None: no expression, None, or a
            semicolon behind it.

        Raises:
            BaseException: Whatever the cell raises, SyntaxError, KeyboardInterrupt and SystemExit
                included; the traceback begins with the cell's own frame.
        """
        return self._shell.run(source)

    def complete(self, code: str, cursor: int) -> Completions:
        """What could stand at the cursor, by what this worker's names are bound to.

        Args:
            code: A cell's text.
            cursor: How many characters stand before the cursor.
        """
        from IPython.core.completer import provisionalcompleter, rectify_completions

        with provisionalcompleter():
            completer = self._shell.Completer
            found = list(rectify_completions(code, completer.completions(code, cursor)))
        if not found:
            return Completions(matches=(), start=cursor, end=cursor, types=())
        return Completions(
            matches=tuple(f.text for f in found),
            start=found[0].start,
            end=found[0].end,
            types=tuple(f.type or "" for f in found),
        )

    def inspect(self, name: str, detail: int) -> dict[str, str] | None:
        """What `name?` shows, or `name??` for detail 1; None if there is no such thing.

        Args:
            name: A name, or a path of attributes.
            detail: 0, or 1 for the source as well.
        """
        try:
            found = self._shell.object_inspect_mime(name, detail_level=detail)  # type: ignore[no-untyped-call]
        except KeyError:
            return None
        return dict(found)


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning with the place as a notebook's user knows it, and the line of code."""
    frame = frames.Frame(file=filename, line=lineno, function="")
    code = line.strip() if line else frames.source_line(frame)
    told = f"{frames.place(frame)}: {category.__name__}: {message}\n"
    return told + (f"  {code}\n" if code else "")


def _adopt_inline_figures(shell: WorkerShell) -> None:
    """Connect figures to this shell, if this process was forked from one that has drawn some."""
    inline = sys.modules.get(_INLINE)
    if inline is None:
        return
    inline.configure_inline_support.current_backend = "unset"  # the formats are the old shell's
    inline.InlineBackend.clear_instance()
    inline.configure_inline_support(shell, f"module://{_INLINE}")
