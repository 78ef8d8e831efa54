"""``FileArena``: tensors that lie in a file of a checkpoint, mapped instead of read.

    notebook process           model.safetensors              worker (one of N)
    module.weight ──► private map ──► [ weight | bias ] ◄── private map ◄── module.weight

All processes see the file's pages, which the system keeps in memory once and takes back where it is
short of memory. A launch hands the file itself to its workers: nothing is copied. What a process
writes is its own, so before trained weights come home, or where the notebook has changed some, the
arena moves to an anonymous memory file, at the same addresses.
"""

from __future__ import annotations

import os
from pathlib import Path

from nbaccel.base.process_death import uninterrupted
from nbaccel.transfer import memfd
from nbaccel.transfer.arena import Arena

__all__ = ["FileArena"]


class FileArena(Arena):
    """A file, mapped copy-on-write; its tensors keep it alive."""

    def __init__(self, path: Path) -> None:
        self._is_file = True
        file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(file_descriptor, os.fstat(file_descriptor).st_size, is_private=True)

    def sync(self) -> None:
        """See :meth:`Arena.sync`."""
        if self._is_file and self.written():
            self.leave_file()

    def leave_file(self) -> None:
        """See :meth:`Arena.leave_file`."""
        if not self._is_file:
            return
        memory_file = memfd.create_file("arena", self.nbytes)
        try:
            memfd.write_at(memory_file, self.view(0, self.nbytes), 0)
        except BaseException:  # an interrupt, or memory that is short: nothing has changed
            os.close(memory_file)
            raise
        with uninterrupted():
            self.replace(memory_file, is_private=False)
            checkpoint_file = self.fd
            self.fd = memory_file
            self._is_file = False
            os.close(checkpoint_file)

    def make_private(self) -> None:
        """See :meth:`Arena.make_private`; a mapped file is private already, writes included."""
        if not self._is_file:
            super().make_private()
