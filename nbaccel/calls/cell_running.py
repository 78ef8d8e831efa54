"""A notebook's cells in a worker: run, completed, explained.

IPython is imported when a worker makes its shell, and not with this file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbaccel.base import frames
from nbaccel.base.optional_packages import require
from nbaccel.workers import worker_output

if TYPE_CHECKING:
    from nbaccel.calls.worker_shell import WorkerShell


__all__ = ["make_shell"]


def make_shell(send_message: Callable[[Any], None], *, rank: int) -> WorkerShell:
    """Make the shell of this process, whose `__main__` module is the namespace of cells.

    That of a forked kernel is dropped.
    """
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
    return worker_shell


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
