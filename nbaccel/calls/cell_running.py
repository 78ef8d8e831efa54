"""A notebook's cells in a worker: run, completed, explained.

IPython is imported when a worker makes its shell, and not with this file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base import frames
from nbaccel.base.optional_packages import require
from nbaccel.calls.cell_source import CellSource
from nbaccel.workers import worker_output

if TYPE_CHECKING:
    from nbaccel.calls.worker_shell import WorkerShell


__all__ = ["CellShell", "Completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What could stand in the code from `start` to `end`."""

    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...]
    """Of each match: `function`, `instance`, …; empty where IPython cannot tell."""


class CellShell:
    """Runs cells in this process, whose `__main__` module is their namespace."""

    def __init__(self, worker_shell: WorkerShell) -> None:
        self._shell = worker_shell
        self.user_ns: dict[str, Any] = worker_shell.user_ns
        """The namespace, which persists from cell to cell."""

    @classmethod
    def create(cls, send_message: Callable[[Any], None], *, rank: int) -> CellShell:
        """Make this process's shell; that of a forked kernel is dropped."""
        require("IPython", extra="notebook", why="Running cells in workers")
        from IPython.core.interactiveshell import InteractiveShell

        from nbaccel.calls.worker_shell import WorkerShell

        worker_output.text_bars()
        worker_output.forget_shells(InteractiveShell)
        worker_output.mute_comms()
        # A forked kernel's hook would send results to the browser; the shell sets one around a
        # cell.
        sys.displayhook = sys.__displayhook__
        worker_shell: WorkerShell = WorkerShell.instance(
            rank=rank, publisher=worker_output.publisher_class(send_message)
        )
        warnings.formatwarning = _format_warning
        worker_output.connect_inline_figures(worker_shell)
        return cls(worker_shell)

    @property
    def hidden(self) -> frozenset[str]:
        """Names in `user_ns` that IPython put there, not the user."""
        return frozenset(self._shell.user_ns_hidden) | {"__builtin__", "__builtins__"}

    def run(self, source: CellSource) -> dict[str, Any] | None:
        """Run a cell and return its last expression, if it ends in one."""
        return self._shell.run(source)

    def complete(self, code: str, cursor_position: int) -> Completions:
        """What could stand at the cursor, by what this worker's names are bound to."""
        from IPython.core.completer import provisionalcompleter, rectify_completions

        with provisionalcompleter():
            ipython_completer = self._shell.Completer
            completions = list(
                rectify_completions(code, ipython_completer.completions(code, cursor_position))
            )
        if not completions:
            return Completions(matches=(), start=cursor_position, end=cursor_position, types=())
        return Completions(
            matches=tuple(completion.text for completion in completions),
            start=completions[0].start,
            end=completions[0].end,
            types=tuple(completion.type or "" for completion in completions),
        )

    def inspect(self, name: str, detail: int) -> dict[str, str] | None:
        """What `name?` shows, or `name??` for detail 1; None if there is no such thing."""
        try:
            inspected_bundle = self._shell.object_inspect_mime(name, detail_level=detail)  # type: ignore[no-untyped-call]
        except KeyError:
            return None
        return dict(inspected_bundle)


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning with the place as a notebook's user knows it, and the line of code."""
    caller_frame = frames.Frame(file=filename, line=lineno, function="")
    code = line.strip() if line else frames.source_line(caller_frame)
    text = f"{frames.place(caller_frame)}: {category.__name__}: {message}\n"
    return text + (f"  {code}\n" if code else "")
