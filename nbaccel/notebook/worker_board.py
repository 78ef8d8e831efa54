"""The board of live workers that `%accelerate` shows, brought up to date after each cell."""

from __future__ import annotations

from typing import Any

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
        self._events = session.shell.events
        self._handle: Any = None
        self._is_new = False

    def show(self) -> None:
        """Show the workers; from now on after each cell, too."""
        self.unload()
        pool = self._session.pool
        if pool is None:
            print(self._session.told_absence())
            return
        if not publish.has_cells():
            display(pool.status())  # type: ignore[no-untyped-call]
            return
        self._handle = display(pool.status(), display_id=True)  # type: ignore[no-untyped-call]
        self._is_new = True
        self._events.register("post_run_cell", self._refresh)

    def unload(self) -> None:
        """Leave the board as it is."""
        if self._handle is not None:
            self._handle = None
            self._events.unregister("post_run_cell", self._refresh)

    def _refresh(self, _cell_result: object = None) -> None:
        # The cell that shows it has just done so.
        is_new, self._is_new = self._is_new, False
        pool = self._session.pool
        if pool is None:
            # The workers were ended on request: the table stays as it was last.
            self.unload()
        elif not is_new:
            self._handle.update(pool.status())
