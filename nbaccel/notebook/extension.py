"""`%load_ext nbaccel`: what a notebook gets, and gives back at `%unload_ext`."""

from __future__ import annotations

import atexit

from IPython.core.interactiveshell import InteractiveShell

from nbaccel.launch import warmup
from nbaccel.notebook.cells import Cells
from nbaccel.notebook.completion import Completion
from nbaccel.notebook.hints import Hints
from nbaccel.notebook.inspection import Inspection
from nbaccel.notebook.magics import NAME, cell_magic, line_magic
from nbaccel.notebook.readiness import Readiness
from nbaccel.notebook.session import Session

__all__ = ["Extension", "load", "unload"]


class Extension:
    """All that one shell was given."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.session = Session(shell)
        self._cells = Cells(shell)
        self._completion = Completion(self.session)
        self._inspection = Inspection(self.session)
        self._hints = Hints(self.session)
        self._readiness = Readiness(shell)
        self._started_template = False

    def load(self) -> None:
        """Give it."""
        self._started_template = warmup.current() is None
        warmup.start_ahead()  # so that its imports are done by the time the first cell is run
        register = self.shell.magics_manager.register_function
        register(cell_magic(self.session, self._cells), "cell", NAME)
        register(line_magic(self.session, self._cells), "line", NAME)
        self._cells.load()
        self._completion.load()
        self._inspection.load()
        self._hints.load()
        self._readiness.load()
        atexit.register(self.session.stop)

    def unload(self) -> None:
        """Take it back."""
        atexit.unregister(self.session.stop)
        self._readiness.unload()
        self._hints.unload()
        self._inspection.unload()
        self._completion.unload()
        self._cells.unload()
        for kind in ("line", "cell"):
            self.shell.magics_manager.magics[kind].pop(NAME, None)
        self.session.stop()
        if self._started_template:
            warmup.stop()


class _Slot:
    """The extension of each shell of this process; there is one shell, but in tests."""

    loaded: dict[int, Extension] = {}  # noqa: RUF012 - the one of this process


def load(shell: InteractiveShell) -> Extension:
    """Give a shell the magics, unless it has them.

    Args:
        shell: The notebook's shell.

    Returns:
        What it was given.
    """
    extension = _Slot.loaded.get(id(shell))
    if extension is None:
        extension = Extension(shell)
        extension.load()
        _Slot.loaded[id(shell)] = extension
    return extension


def unload(shell: InteractiveShell) -> None:
    """Take the magics from a shell, and end its workers.

    Args:
        shell: The notebook's shell.
    """
    if extension := _Slot.loaded.pop(id(shell), None):
        extension.unload()
