"""`%load_ext nbaccel`: what it adds to a notebook, and `%unload_ext` removes."""

from __future__ import annotations

import atexit

from IPython.core.interactiveshell import InteractiveShell

from nbaccel.notebook.cells import Cells
from nbaccel.notebook.completion import Completion, Inspection
from nbaccel.notebook.hints import Hints
from nbaccel.notebook.magics import MAGIC_NAME, cell_magic, line_magic
from nbaccel.notebook.session import Readiness, Session
from nbaccel.notebook.worker_board import WorkerBoard
from nbaccel.plan import registry
from nbaccel.workers import template


class Extension:
    """Everything that was added to one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.session = Session(shell)
        self._cells = Cells(shell)
        self._completion = Completion(self.session)
        self._inspection = Inspection(self.session)
        self._hints = Hints(self.session)
        self._board = WorkerBoard(self.session)
        self._readiness = Readiness(shell)
        self._started_template = False

    def load(self) -> None:
        """Add it."""
        # A template that somebody else started must survive `%unload_ext`.
        self._started_template = not template.running()
        # Now, so that its imports are done by the time the first cell is run.
        if self._started_template:
            template.template_for(registry.prepare_notebook()).start_ahead()
        template.follow_cells()
        register_magic = self.shell.magics_manager.register_function
        register_magic(cell_magic(self.session, self._cells), "cell", MAGIC_NAME)
        register_magic(line_magic(self.session, self._cells, self._board), "line", MAGIC_NAME)
        self._cells.load()
        self._completion.load()
        self._inspection.load()
        self._hints.load()
        self._readiness.load()
        atexit.register(self.session.stop)

    def unload(self) -> None:
        """Remove it."""
        atexit.unregister(self.session.stop)
        self._readiness.unload()
        self._hints.unload()
        self._inspection.unload()
        self._completion.unload()
        self._cells.unload()
        for magic_kind in ("line", "cell"):
            self.shell.magics_manager.magics[magic_kind].pop(MAGIC_NAME, None)
        self.session.stop()
        self._board.tell_end()
        if self._started_template:
            template.unfollow_cells()
            template.stop()


class _ShellSlot:
    """The extension of each shell of this process; only tests have several shells."""

    loaded: dict[int, Extension] = {}  # noqa: RUF012 - the one of this process


def load_extension(shell: InteractiveShell) -> Extension:
    """Add the magics to a shell, unless it has them."""
    extension = _ShellSlot.loaded.get(id(shell))
    if extension is None:
        extension = Extension(shell)
        extension.load()
        _ShellSlot.loaded[id(shell)] = extension
    return extension


def unload_extension(shell: InteractiveShell) -> None:
    """Remove the magics from a shell, and end its workers."""
    if extension := _ShellSlot.loaded.pop(id(shell), None):
        extension.unload()
