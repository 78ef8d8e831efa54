"""The parts of IPython and ipykernel without a public name that nbaccel uses.

Seen in IPython 7.34 to 9 and ipykernel 6.17 to 7. Each function takes the object that has the name,
so nothing is imported here. Where a version lacks one, the function does without it as its
docstring says. No other module uses private names of IPython; `tests/house` checks it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = [
    "cell_numbers",
    "inspect_also",
    "keep_cell_lines",
    "keep_no_prints",
    "number_cell",
    "reply_where_sent",
    "show_traceback_lines",
    "wrap_completions",
]


def cell_numbers(compiler: Any) -> dict[str, int] | None:
    """The numbers of cells by the file names that they were compiled under.

    Args:
        compiler: A shell's `compile`.

    Returns:
        The table itself; None before IPython 8, which puts the number into the file name.
    """
    numbers: dict[str, int] | None = getattr(compiler, "_filename_map", None)
    return numbers


def number_cell(compiler: Any, file_name: str, number: int) -> None:
    """Let IPython show a cell's frames as `In[number]`; before IPython 8, the name shows it."""
    numbers = cell_numbers(compiler)
    if numbers is not None:
        numbers[file_name] = number


def keep_cell_lines(name: str, entry: Any) -> None:
    """Keep a cell's lines in `linecache` where IPython restores them: 7 does, from its own copy."""
    # Other versions have no such table: the entry goes into a dict that is thrown away.
    getattr(linecache, "_ipython_cache", {})[name] = entry


def keep_no_prints(shell: Any) -> None:
    """Stop IPython 9 from keeping all that cells print for its history; before 9 it does not."""
    if hasattr(shell, "_tee"):
        shell._tee = lambda *_names, **_more: contextlib.nullcontext()


def wrap_completions(
    shell_completer: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace what all completions of IPython before 8.6 come from.

    Args:
        shell_completer: The shell's `IPCompleter`.
        wrapper: Given IPython's method, returns the one to call.

    Returns:
        A function that undoes it.
    """
    complete = getattr(shell_completer, "_complete", None)
    if complete is None:
        _warn("IPCompleter._complete", "names that only workers have are not completed")
        return lambda: None
    # In the instance, so that removing it brings the class's method back.
    vars(shell_completer)["_complete"] = wrapper(complete)
    return lambda: vars(shell_completer).pop("_complete", None)


def inspect_also(
    shell: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace what `name?` calls.

    Args:
        shell: The notebook's shell.
        wrapper: Given IPython's method, returns the one to call.

    Returns:
        A function that undoes it.
    """
    inspect = getattr(shell, "_inspect", None)
    if inspect is None:
        _warn("InteractiveShell._inspect", "`name?` does not find names that only workers have")
        return lambda: None
    vars(shell)["_inspect"] = wrapper(inspect)
    return lambda: vars(shell).pop("_inspect", None)


def show_traceback_lines(shell: Any, kind: type, error: BaseException, lines: list[str]) -> None:
    """Show an error as a shell shows tracebacks: in a kernel, as the cell's error.

    A shell without the method prints the lines.
    """
    show = getattr(shell, "_showtraceback", None)
    if show is None:
        sys.stderr.write("\n".join([*lines, ""]))
    else:
        show(kind, error, lines)


def reply_where_sent(comm: Any) -> None:
    """Let a comm's messages be handled where the front end sends them.

    ipykernel 7.4 passes what a front end sends to the thread that used this comm last, which is the
    busy main one, whatever the message's header says (`BaseComm._reply_subshell_for` in
    https://github.com/ipython/ipykernel/blob/v7.4.0/ipykernel/comm/comm.py). Versions without that
    method do not redirect.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = _as_sent


def _as_sent(message_data: Any, subshell: str | None) -> str | None:
    return subshell


def _warn(name: str, loss: str) -> None:
    warnings.warn(f"This IPython lacks {name}: {loss}.", RuntimeWarning, stacklevel=3)
