"""The board of live workers that `%accelerate` shows, brought up to date after each cell."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from nbaccel.notebook.session import Session
from nbaccel.output import publish

__all__ = ["WorkerBoard"]


class WorkerBoard:
    """The newest board of a notebook.

    Where outputs can be replaced it is; elsewhere it is text of the moment. It is no widget: what
    stays in the saved notebook is a plain table.

    Args:
        session: The notebook's workers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shell: InteractiveShell = session.shell
        self._handle: Any = None
        self._is_new = False

    def load(self) -> None:
        """Listen for the ends of cells."""
        self._shell.events.register("post_run_cell", self._refresh)

    def unload(self) -> None:
        """Undo :meth:`load`."""
        self._shell.events.unregister("post_run_cell", self._refresh)
        self._handle = None

    def show(self) -> None:
        """Show the workers; from now on after each cell, too."""
        pool = self._session.pool
        if pool is None:
            self._handle = None
            print(self._session.told_absence())
            return
        handle = display(pool.status(), display_id=publish.has_cells() or None)  # type: ignore[no-untyped-call]
        self._handle, self._is_new = handle, True

    def _refresh(self, _cell_result: object = None) -> None:
        # The cell that shows it has just done so.
        is_new, self._is_new = self._is_new, False
        pool = self._session.pool
        if self._handle is None or is_new:
            return
        if pool is None:
            # The workers were ended on request: the table stays as it was last.
            self._handle = None
            return
        self._handle.update(pool.status())
