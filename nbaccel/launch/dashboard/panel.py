"""The form of a dashboard with a Stop button, for front ends whose clicks arrive while a cell runs.

[Note: who hears a click] A cell keeps the kernel's main thread busy, so that what the front end
sends waits until the cell is through: a button would be deaf just when it is wanted. ipykernel 7
has subshells, threads beside the main one that take messages of their own, and JupyterLab 4.4 and
Notebook 7.4 send what widgets say through one. A front end that knows of them says so in the head
of each request; that it uses one for widgets is seen when it has made one. Both can be told before
a button is shown.

    front end ── click, to its subshell ──► a thread of the kernel ──► `Listener.interrupt`
    main thread, in the listener's `select` ──► the wake pipe ──► `on_interrupt`
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["VIEW", "Panel", "may_be_heard"]

VIEW = "application/vnd.jupyter.widget-view+json"

_STOP = "■ Stop"
_STOPPING = "■ Stopping… press again to end at once"
_TIP = "Interrupts all ranks, as interrupting the cell does. Pressed again, it ends them at once."


def may_be_heard() -> bool:
    """Whether kernel and front end know of subshells, and there are widgets."""
    kernel = _kernel()
    return (
        kernel is not None
        and threading.current_thread() is threading.main_thread()
        and _subshells(kernel) is not None
        and "subshell_id" in (kernel.get_parent("shell") or {}).get("header", {})
        and importlib.util.find_spec("ipywidgets") is not None
    )


class Panel:
    """The facts, and a button.

    Its widgets exist from now on; whether they can be shown is told by `is_heard`.

    Args:
        on_click: What the button does, in a thread of the front end's.
    """

    def __init__(self, on_click: Callable[[], None]) -> None:
        widgets = importlib.import_module("ipywidgets")
        self._facts = widgets.HTML()
        # No icon: a server refuses Notebook 7 the font of its icons.
        self._button = widgets.Button(description=_STOP, button_style="danger", tooltip=_TIP)
        self._button.add_class("nbaccel-stop")
        self._button.on_click(lambda _: on_click())
        self._box = widgets.VBox([self._facts, self._button])
        self._box.layout.align_items = "flex-start"
        self._button.layout.width = "auto"
        _keep_its_way(self._button)

    @property
    def is_heard(self) -> bool:
        """Whether the front end has opened a way for what widgets say while the cell runs."""
        kernel = _kernel()
        found = _subshells(kernel) if kernel is not None else None
        return bool(found and found())

    @property
    def view(self) -> dict[str, Any]:
        """What shows it, as the content of `VIEW`."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, facts: str, *, is_stopping: bool) -> None:
        """Change what it shows.

        Args:
            facts: As HTML.
            is_stopping: Whether Stop has been pressed.
        """
        self._facts.value = facts
        self._button.description = _STOPPING if is_stopping else _STOP

    def close(self) -> None:
        """Let go of it, here and in the front end."""
        for widget in (self._button, self._facts, self._box):
            for part in (widget, widget.layout, getattr(widget, "style", None)):
                if part is not None:
                    with contextlib.suppress(Exception):  # of a front end that is gone: any
                        part.close()


def _keep_its_way(button: Any) -> None:
    """Let clicks be taken where the front end sends them.

    ipykernel 7.4 hands what a front end says to the thread that spoke on this comm last, which is
    the busy main one, whatever the message's own head says (`BaseComm._reply_subshell_for` in
    https://github.com/ipython/ipykernel/blob/v7.4.0/ipykernel/comm/comm.py).
    """
    comm = button.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = _as_it_was_sent


def _as_it_was_sent(data: Any, sent_to: str | None) -> str | None:
    return sent_to


def _kernel() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)


def _subshells(kernel: Any) -> Callable[[], list[str]] | None:
    """What lists the kernel's subshells; None in a kernel without them."""
    thread = getattr(kernel, "shell_channel_thread", None)
    return getattr(getattr(thread, "manager", None), "list_subshell", None)
