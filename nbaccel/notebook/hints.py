"""Where a notebook's own error has to do with the workers, a line below it says so."""

from __future__ import annotations

import sys
from typing import Any

from nbaccel.errors import WorkerFailed
from nbaccel.notebook.session import Session

__all__ = ["Hints"]


class Hints:
    """Looks at each cell's error after IPython has shown it.

    Args:
        session: The notebook's workers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def load(self) -> None:
        """Begin to look."""
        self._session.shell.events.register("post_run_cell", self._look)

    def unload(self) -> None:
        """Look no more."""
        self._session.shell.events.unregister("post_run_cell", self._look)

    def _look(self, result: Any = None) -> None:
        error = getattr(result, "error_in_exec", None)
        if isinstance(error, NameError) and not isinstance(error, WorkerFailed):
            name = getattr(error, "name", None)
            if name and name not in self._session.shell.user_ns and self._workers_have(name):
                sys.stderr.write(
                    f"nbaccel: {name} exists in the workers of %%accelerate. To have it here: "
                    f"%accelerate pull {name}\n"
                )

    def _workers_have(self, name: str) -> bool:
        pool = self._session.pool
        return pool is not None and self._session.is_live() and pool.inspect(name) is not None
