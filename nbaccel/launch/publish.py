"""Showing rich output in the notebook: in the cell, or as text where there is no IPython."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_RENDER = "_render_traceback_"


def show(message: Any) -> None:
    """Carry out what a worker asked for.

    Args:
        message: `wire.Display` or `wire.ClearOutput`; anything else is ignored.
    """
    from nbaccel.launch import wire  # it brings torch, which the message's maker has

    if isinstance(message, wire.ClearOutput):
        clear(wait=message.wait)
    elif isinstance(message, wire.Display):
        display(message.content)


def display(content: Mapping[str, Any]) -> None:
    """Publish rich output in the current cell; outside IPython, print its text form.

    Args:
        content: `data` and `metadata` by media type; `transient` and `update` as IPython has them.
    """
    shell = _shell()
    if shell is not None:
        shell.display_pub.publish(**content)
    elif (text := content["data"].get("text/plain")) is not None:
        sys.stdout.write(f"{text}\n")


def clear(*, wait: bool) -> None:
    """Clear the cell's output, where there is a cell.

    Args:
        wait: Not before there is something new to show.
    """
    shell = _shell()
    if shell is not None:
        shell.display_pub.clear_output(wait=wait)


def show_by_its_text(kind: type[BaseException]) -> None:
    """Let IPython ask the next exception of this class how it is to be shown.

    It asks all but groups, of which it prints every frame.

    Args:
        kind: A class with `_render_traceback_`. Handlers of the user's stay as they are.
    """
    shell = _shell()
    if shell is None or any(not hasattr(c, _RENDER) for c in shell.custom_exceptions):
        return

    def show_traceback(shell: Any, kind: type, error: Any, tb: Any, tb_offset: Any = None) -> Any:
        shell.set_custom_exc((), None)
        lines = error._render_traceback_()
        shell._showtraceback(kind, error, lines)
        return lines

    shell.set_custom_exc((kind,), show_traceback)


def has_cells() -> bool:
    """Whether output can be changed after it was shown: there is a kernel, and a browser at it."""
    return getattr(_shell(), "kernel", None) is not None


def is_watched() -> bool:
    """Whether somebody reads what appears as it appears: no file, and no other program."""
    return _shell() is not None or sys.stderr.isatty()


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
