"""The notebook's memory files that all nodes have copies of.

    notebook's file                        node's copy                     gets there, and back
    arena, or a checkpoint's file   ──►    one, however many ranks map it  all of it; later what has
                                                                           changed since
    staging file                    ──►    one, empty                      nothing
                                    ◄──                                    what a rank wrote of it
    payloads, long messages         ──►    one                             all of it

What is large goes by Ray's object store, which brings it once to each node; it stays there until
all nodes have written it into their copy. The kind of a file is in its name: memory files have one,
which only people and this module read.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nbaccel.hosts.node_actor import FileContent
from nbaccel.transfer import memfd

ARENA = "arena"
STAGING = "staging"
_KEPT_PAYLOADS = 8
"""A payload is sent to one rank after the other; further ones are not needed again."""
_PIECE_BYTES = 1 << 20
"""What has changed is found and sent in pieces of this size."""
_LEAST_STORED_BYTES = 1 << 16
"""Less goes as an argument of the call."""
_MEMORY_FILE = re.compile(r"/memfd:nbaccel-(\S+) \(deleted\)$")


@dataclass(eq=False)
class SharedFile:
    """A file of the notebook's."""

    number: int
    """Its name on the nodes."""
    descriptor: int
    kind: str
    """`arena`, `staging`, `payload`, `message`."""
    num_bytes: int
    arena_key: str = ""
    digests: dict[int, int] = field(default_factory=dict)
    """First byte of a piece → digest of what was sent."""

    def news(self) -> FileContent:
        """What of it nodes have not been sent; of a staging file, which ranks fill, nothing."""
        import ray

        if self.kind == STAGING:
            return self.number, self.kind, self.num_bytes, ()
        with mmap.mmap(self.descriptor, self.num_bytes, access=mmap.ACCESS_READ) as content:
            array = np.frombuffer(content, dtype=np.uint8)
            changed = {}
            for start in range(0, self.num_bytes, _PIECE_BYTES):
                digest = xxhash.xxh3_64_intdigest(array[start : start + _PIECE_BYTES].data)
                if self.digests.get(start) != digest:
                    changed[start] = digest
            self.digests |= changed
            pieces = [(start, array[start : start + _PIECE_BYTES]) for start in changed]
            is_large = sum(piece.nbytes for _, piece in pieces) >= _LEAST_STORED_BYTES
            copies: Any = (
                ray.put(pieces) if is_large else [(start, piece.copy()) for start, piece in pieces]
            )
            # Or the mapping could not be closed.
            del array, pieces
        return self.number, self.kind, self.num_bytes, copies


class SharedFiles:
    """What records all nodes have to be sent; the files of one session."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], SharedFile] = {}
        self._numbers = itertools.count()

    def share(self, fd: int) -> tuple[SharedFile, list[FileContent]]:
        """A file, and what nodes need to have a copy, unless they have one."""
        identity = memfd.file_identity(fd)
        if identity in self._files:
            return self._files[identity], []
        name = _MEMORY_FILE.match(str(Path(f"/proc/self/fd/{fd}").readlink()))
        file = SharedFile(
            number=next(self._numbers),
            # Open as long as the copies are there: the system could give its number to another.
            descriptor=os.dup(fd),
            # A file on disk is a checkpoint whose tensors are mapped: an arena like any other.
            kind=name[1] if name else ARENA,
            num_bytes=os.fstat(fd).st_size,
        )
        self._files[identity] = file
        return file, [file.news()]

    def changes(self) -> list[FileContent]:
        """What the notebook has written to its arenas since they were sent."""
        return [
            content
            for file in self._files.values()
            # Its pieces: what is as it was when it was sent is not sent again.
            if file.kind == ARENA and (content := file.news())[-1]
        ]

    def forget(self, arena_keys: Collection[str], *, staging: bool) -> list[int]:
        """Drop these arenas, all staging files if asked to, and payloads that no rank will get.

        Returns their numbers.
        """
        payloads = [file for file in self._files.values() if file.kind not in (ARENA, STAGING)]
        return self._drop(
            file
            for file in self._files.values()
            if file.arena_key in arena_keys
            or (staging and file.kind == STAGING)
            or file in payloads[:-_KEPT_PAYLOADS]
        )

    def close(self) -> None:
        """Close all descriptors."""
        self._drop(self._files.values())

    def _drop(self, dropped_files: Iterable[SharedFile]) -> list[int]:
        dropped = list(dropped_files)
        self._files = {
            identity: file for identity, file in self._files.items() if file not in dropped
        }
        memfd.close_all(file.descriptor for file in dropped)
        return [file.number for file in dropped]
