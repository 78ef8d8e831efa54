"""`%load_ext nbaccel`: what it adds to a notebook, and `%unload_ext` removes."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from IPython.core.interactiveshell import InteractiveShell

from nbaccel.notebook.cells import Cells
from nbaccel.notebook.completion import Completion, Inspection
from nbaccel.notebook.hints import hint_after_cells
from nbaccel.notebook.magics import MAGIC_NAME, cell_magic, line_magic
from nbaccel.notebook.session import Session, import_with_torch
from nbaccel.notebook.worker_board import WorkerBoard
from nbaccel.plan import registry
from nbaccel.workers import template


class Extension:
    """Everything that was added to one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.session = Session(shell)
        self._added = ExitStack()
        """Removes it, in the opposite order."""

    def load(self) -> None:
        """Add it."""
        session = self.session
        shell = session.shell
        undo = self._added.callback
        # A template that somebody else started must survive `%unload_ext`.
        if not template.running():
            # Now, so that its imports are done by the time the first cell is run.
            template.template_for(registry.prepare_notebook()).start_ahead()
            undo(template.stop)
            undo(template.unfollow_cells)
        template.follow_cells()
        board = WorkerBoard(session)
        undo(board.tell_end)
        undo(session.stop)
        cells = Cells(shell)
        magics = {"cell": cell_magic(session, cells), "line": line_magic(session, cells, board)}
        for magic_kind, magic in magics.items():
            shell.magics_manager.register_function(magic, magic_kind, MAGIC_NAME)
            undo(shell.magics_manager.magics[magic_kind].pop, MAGIC_NAME, None)
        for load in (cells.load, Completion(session).load, Inspection(session).load):
            undo(load())
        undo(hint_after_cells(session))
        undo(import_with_torch(shell))
        atexit.register(session.stop)
        undo(atexit.unregister, session.stop)

    def unload(self) -> None:
        """Remove it."""
        self._added.close()


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
