"""Showing in the notebook what a worker displayed."""

from __future__ import annotations

import sys
from typing import Any

from nbaccel.launch import wire


def show(message: Any) -> None:
    """Publish a worker's rich output in the current cell; outside IPython, its text form."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if isinstance(message, wire.ClearOutput):
        if shell is not None:
            shell.display_pub.clear_output(wait=message.wait)
    elif isinstance(message, wire.Display):
        if shell is not None:
            shell.display_pub.publish(**message.content)
        else:
            sys.stdout.write(str(message.content["data"].get("text/plain", "")) + "\n")
