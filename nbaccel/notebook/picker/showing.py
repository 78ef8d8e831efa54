"""Where a picker is shown: live widgets and, beside them, a table that a saved notebook keeps.

    cell's outputs   [ widgets, live           ]   hide the table as long as they are there
                     [ table: HTML and text    ]   what GitHub, nbconvert and a reader see

The table is renewed a moment after a change, or at the end of the cell that made it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbaccel._optional import is_installed
from nbaccel._origin import install_line
from nbaccel.notebook.picker.texts import static_html, static_text

if TYPE_CHECKING:
    from nbaccel.notebook.picker.model import PickerModel
    from nbaccel.notebook.picker.widgets import PickerView

__all__ = ["Showing"]

_PAUSE_S = 0.3
_WIDGETS_FROM = 7
_VIEW = "application/vnd.jupyter.widget-view+json"


class Showing:
    """Shows one picker, in as many cells as it is asked to.

    Args:
        model: The picker's model.
        panels: Which panels.
        is_whole: Whether memory, the configuration and files are shown, too.
        lock: Held while the model is read or changed.
        name: A name that no other picker has.
    """

    def __init__(
        self,
        model: PickerModel,
        panels: Sequence[str],
        *,
        is_whole: bool,
        lock: threading.RLock,
        name: str,
    ) -> None:
        self._model, self._lock = model, lock
        self._panels, self._is_whole = panels, is_whole
        self._css_class = f"nbaccel-static-{name}"
        self._view: PickerView | None = None
        self._shown_in: object = None
        self._is_stale = False

    def show(self) -> None:
        """Show it in the cell that is running."""
        shell = _shell()
        if shell is None:
            return  # a script: whoever wants the text prints the picker
        self._shown_in = _moment(shell)
        missing = _missing(shell)
        if missing:
            print(f"{static_text(self._model, self._panels)}\n\n{missing}")
        else:
            self._show_widgets()

    def show_once(self) -> None:
        """The same, unless this cell has done so: `configure(model)` is often its last line."""
        shell = _shell()
        if shell is None or self._shown_in != _moment(shell):
            self.show()

    def _show_widgets(self) -> None:
        from IPython.display import display

        with self._lock:
            view = self._live_view()
            bundle = {
                "text/plain": "",
                _VIEW: {"version_major": 2, "version_minor": 0, "model_id": view.root.model_id},
            }
            display(bundle, raw=True)  # type: ignore[no-untyped-call]
            display(self._table(), raw=True, display_id=self._css_class)  # type: ignore[no-untyped-call]
            self._model.rehearse()  # while the form is read; what is clicked meanwhile comes after

    def _live_view(self) -> PickerView:
        if self._view is None:
            from nbaccel.notebook.picker.widgets import PickerView

            self._view = PickerView(
                self._model,
                self._panels,
                is_whole=self._is_whole,
                lock=self._lock,
                hides=self._css_class,
            )
            self._model.observe(self._view.sync)
            self._model.observe(self._changed)
        return self._view

    def _table(self) -> dict[str, str]:
        html = static_html(self._model, self._panels)
        return {
            "text/html": f'<div class="nbaccel-static {self._css_class}">{html}</div>',
            "text/plain": static_text(self._model, self._panels),
        }

    # ---------------------------------------------------------------- keeping the table up to date
    def _changed(self) -> None:
        shell = _shell()
        if self._is_stale or shell is None:
            return
        self._is_stale = True
        # A cell that changes it may be the notebook's last.
        shell.events.register("post_run_cell", self._renew)
        try:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._renew)
        except RuntimeError:  # no loop runs in this thread: nothing would call later
            self._renew()

    def _renew(self, result: object = None) -> None:
        from IPython.display import update_display

        with self._lock:
            if not self._is_stale:
                return
            self._is_stale = False
            shell = _shell()
            if shell is not None:
                shell.events.unregister("post_run_cell", self._renew)
            update_display(self._table(), raw=True, display_id=self._css_class)  # type: ignore[no-untyped-call]


def _shell() -> Any:
    """The shell that runs cells; None in a script."""
    ipython = sys.modules.get("IPython")  # where nobody has imported it, no cell runs
    return None if ipython is None else ipython.get_ipython()


def _moment(shell: Any) -> object:
    """Which execution of which cell this is."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    return parent.get("header", {}).get("msg_id") or shell.execution_count


def _missing(shell: Any) -> str:
    """Why there are no widgets, with what to do; empty where there are."""
    if not hasattr(shell, "kernel"):
        return "In a notebook this is a form. Here: picker.choose(name, value)."
    if not is_installed("ipywidgets"):
        return f"In a notebook with ipywidgets this is a form: {install_line('notebook')}"
    import ipywidgets

    if int(ipywidgets.__version__.partition(".")[0]) < _WIDGETS_FROM:
        return (
            f"ipywidgets {ipywidgets.__version__} is too old for the form, which needs "
            f"{_WIDGETS_FROM} or later. Without it: picker.choose(name, value)."
        )
    return ""
