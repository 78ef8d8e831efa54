"""Folders on disk that a process would leave behind if it were killed, reported to the notebook.

A worker that ends by itself removes its own. One that is killed cannot, so it reports them
beforehand, and the notebook removes what is still there when the worker has ended.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LeftoverFolders:
    """Folders of one process."""

    base: Path  # the folder that holds them
    pattern: str  # which of the folders below it, as `Path.glob` reads it
    whole: bool = False  # whether the base itself goes, too, once nothing is in it

    def remove(self) -> None:
        """Remove them, and the folders above them in which nothing is left."""
        for folder in self.base.glob(self.pattern):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in folder.parents:
                if parent == self.base:
                    break
                # Not empty: another process, or the user, has files there.
                with contextlib.suppress(OSError):
                    parent.rmdir()
        if self.whole:
            with contextlib.suppress(OSError):
                self.base.rmdir()


_LEFTOVER_LISTENERS: list[Callable[[LeftoverFolders, bool], None]] = []


def listen_for_leftovers(listener: Callable[[LeftoverFolders, bool], None]) -> None:
    """Report this process's folders to a listener from now on."""
    # Replaced, not added to: a live worker has a new reporter for each cell.
    _LEFTOVER_LISTENERS[:] = [listener]


def announce_leftover(leftover: LeftoverFolders, *, is_there: bool) -> None:
    """Say what will have to be removed if this process cannot do it."""
    for listener in _LEFTOVER_LISTENERS:
        listener(leftover, is_there)
