"""Imports ahead of the first `%%accelerate` cell, where they cost nothing that is noticed."""

from __future__ import annotations

import contextlib
import importlib
import sys

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Readiness"]

# The pool, and what it asks numpy for at its start: half of a first cell's time.
_NEEDED = ("nbaccel.pool.pool", "numpy.random")


class Readiness:
    """Brings in what starts workers, as soon as the notebook has torch of its own accord.

    Before that it would take seconds, which a notebook that never starts workers need not spend.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._listens = False

    def load(self) -> None:
        """Import now if torch is there, else after the cell that imports it."""
        self._listens = True
        self._shell.events.register("post_run_cell", self._look)
        self._look()

    def unload(self) -> None:
        """Wait no more."""
        if self._listens:
            self._listens = False
            self._shell.events.unregister("post_run_cell", self._look)

    def _look(self, _result: object = None) -> None:
        if "torch" in sys.modules:
            self.unload()
            # What is missing is told by the cell that needs it.
            with contextlib.suppress(ImportError):
                for name in _NEEDED:
                    importlib.import_module(name)
