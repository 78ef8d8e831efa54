"""Showing rich output in the notebook: in the cell, or as text where there is no IPython."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


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


def has_cells() -> bool:
    """Whether output can be changed after it was shown: there is a kernel, and a browser at it."""
    return getattr(_shell(), "kernel", None) is not None


def is_watched() -> bool:
    """Whether somebody reads what appears as it appears: no file, and no other program."""
    return _shell() is not None or sys.stderr.isatty()


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
