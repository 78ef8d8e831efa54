"""The board of live workers that `%accelerate` shows, and keeps up to date.

    while a cell runs   whenever its panel looks at the ranks, about once a second
    after each cell     with the names that workers hold now
    between cells       every two seconds: what has changed by itself, such as a worker that the
                        system has killed; nothing is sent if nothing has changed

[Note: who looks between cells] A timer of the kernel's own event loop, in the main thread: it runs
only while no cell does. A thread could send a display while a cell prints; ipykernel would
give it whichever cell is running as its parent, and a worker that is forked from the notebook would
be without a thread that it has a record of. What a timer leaves behind in a forked worker is an
entry of an event loop that never runs there.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.display import display

from nbaccel.notebook.session import Session
from nbaccel.output import publish

if TYPE_CHECKING:  # it would import torch, which loading the extension does not
    from nbaccel.calls.status_table import StatusTable

_POLL_INTERVAL_S = 2.0


class WorkerBoard:
    """The newest board of a notebook.

    Where outputs can be replaced it is; elsewhere it is text of the moment. It is no widget: what
    stays in the saved notebook is a plain table.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = session.shell.events
        self._handle: Any = None
        self._pool: Any = None
        self._is_new = False
        self._shown: StatusTable | None = None
        self._timer: asyncio.TimerHandle | None = None

    def show(self) -> None:
        """Show the workers, and keep them up to date from now on."""
        pool = self._session.pool
        # A board that is captured is not seen: the one before stays the newest.
        if pool is not None and (self._is_captured() or not publish.has_cells()):
            display(pool.status())  # type: ignore[no-untyped-call]
            return
        self.unload()
        if pool is None:
            print(self._session.absence_text())
            return
        status = pool.status()
        self._handle = display(status, display_id=True)  # type: ignore[no-untyped-call]
        self._pool = pool
        self._is_new = True
        self._shown = status
        self._events.register("post_run_cell", self._after_cell)
        self._session.on_poll = self._renew
        self._poll_later()

    def tell_end(self) -> None:
        """Show what has become of workers that were ended for good."""
        if self._handle is not None:
            self._renew()
        self.unload()

    def unload(self) -> None:
        """Leave the board as it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._handle is not None:
            self._handle = None
            self._session.on_poll = None
            self._events.unregister("post_run_cell", self._after_cell)

    def _is_captured(self) -> bool:
        return isinstance(self._session.shell.display_pub, CapturingDisplayPublisher)

    def _after_cell(self, _result: object = None) -> None:
        # The cell that shows it has just done so.
        is_new = self._is_new
        self._is_new = False
        if not is_new:
            self._renew()

    def _poll_later(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a kernel without one: then it is renewed by cells only
            return
        self._timer = loop.call_later(_POLL_INTERVAL_S, self._poll_between_cells)

    def _poll_between_cells(self) -> None:
        self._timer = None
        self._renew()
        if self._handle is not None:
            self._poll_later()

    def _renew(self) -> None:
        # A cell that captures its output would get the board, too.
        if self._is_captured():
            return
        # After a restart with other settings it is another one; after a stop, which is told once
        # and then for ever, it is the last one.
        pool = self._pool = self._session.pool or self._pool
        status = pool.status()
        if self._session.pool is None and self._shown is not None and self._shown.rows:
            # The saved notebook keeps what the workers were.
            status = self._shown.under(f"{status.headline.rstrip('.')}. Before that:")
        if str(status) != str(self._shown):
            self._shown = status
            self._handle.update(status)
        if self._session.pool is None:
            self.unload()
