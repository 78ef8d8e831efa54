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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from nbaccel.hosts import node_messages
from nbaccel.hosts.node_messages import STAGING
from nbaccel.transfer import memfd

__all__ = ["SharedFiles"]

ARENA = "arena"
_KEPT_PAYLOADS = 8
"""A payload is sent to one rank after the other; further ones are not needed again."""
_PIECE_BYTES = 1 << 20
"""What has changed is found and sent in pieces of this size."""
_LEAST_STORED_BYTES = 1 << 16
"""Less goes as an argument of the call."""
_MEMORY_FILE = re.compile(r"/memfd:nbaccel-(\S+) \(deleted\)$")

_Record = node_messages.NewFile | node_messages.FileBytes | node_messages.Forget


def _file_kind(fd: int) -> str:
    """What a file is for: `arena`, `staging`, `payload`, `message`."""
    file = _MEMORY_FILE.match(str(Path(f"/proc/self/fd/{fd}").readlink()))
    # A file on disk is a checkpoint whose tensors are mapped: an arena like any other.
    return file[1] if file else ARENA


@dataclass
class _SharedFile:
    number: int
    descriptor: int
    kind: str
    num_bytes: int
    digests: dict[int, int] = field(default_factory=dict)
    """First byte of a piece → digest of what was sent."""

    def first_records(self) -> Iterator[_Record]:
        """The file, and all of it; of a staging file, which ranks fill, nothing."""
        yield node_messages.NewFile(self.number, self.kind, self.num_bytes)
        if self.kind == STAGING:
            return
        with mmap.mmap(self.descriptor, self.num_bytes, access=mmap.ACCESS_READ) as content:
            array = np.frombuffer(content, dtype=np.uint8)
            if self.kind == ARENA:
                self.digests = dict(_digests(array))
            yield node_messages.FileBytes(self.number, _stored([(0, array)], self.num_bytes))
            # Or the mapping could not be closed.
            del array

    def changed_records(self) -> Iterator[_Record]:
        """What is different from what was sent."""
        with mmap.mmap(self.descriptor, self.num_bytes, access=mmap.ACCESS_READ) as content:
            array = np.frombuffer(content, dtype=np.uint8)
            changed = [
                (first_byte, digest)
                for first_byte, digest in _digests(array)
                if self.digests[first_byte] != digest
            ]
            if changed:
                pieces = [
                    (first_byte, array[first_byte : first_byte + _PIECE_BYTES].copy())
                    for first_byte, _ in changed
                ]
                self.digests.update(changed)
                num_bytes = len(pieces) * _PIECE_BYTES
                yield node_messages.FileBytes(self.number, _stored(pieces, num_bytes))
            del array


def _digests(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[tuple[int, int]]:
    """First byte and digest of each piece."""
    for first_byte in range(0, array.nbytes, _PIECE_BYTES):
        piece = memoryview(array.data)[first_byte : first_byte + _PIECE_BYTES]
        yield first_byte, xxhash.xxh3_64_intdigest(piece)


def _stored(pieces: list[tuple[int, Any]], num_bytes: int) -> Any:
    """Pieces as they travel: copies of them, or Ray's reference where they are large."""
    import ray

    if num_bytes >= _LEAST_STORED_BYTES:
        return ray.put(pieces)
    return [(first_byte, piece.copy()) for first_byte, piece in pieces]


class SharedFiles:
    """What records all nodes have to be sent; the files of one session."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _SharedFile] = {}
        self._numbers = itertools.count(0, 2)
        self._arena_keys: dict[str, int] = {}

    def share(self, fd: int) -> tuple[int, Sequence[_Record]]:
        """The number of a file, and what nodes need to have a copy, unless they have one."""
        identity = memfd.file_identity(fd)
        file = self._files.get(identity)
        if file is not None:
            return file.number, ()
        shared = _SharedFile(
            number=next(self._numbers),
            # Open as long as the copies are there: the system could give its number to another.
            descriptor=os.dup(fd),
            kind=_file_kind(fd),
            num_bytes=os.fstat(fd).st_size,
        )
        self._files[identity] = shared
        return shared.number, tuple(shared.first_records())

    def name_arenas(self, arena_keys: Sequence[str], file_numbers: Sequence[int]) -> None:
        """Note the keys of arenas that were just shared."""
        self._arena_keys.update(zip(arena_keys, file_numbers, strict=True))

    def changes(self) -> list[_Record]:
        """What the notebook has written to its arenas since they were sent."""
        return [record for file in self._of_kind(ARENA) for record in file.changed_records()]

    def is_staging(self, number: int) -> bool:
        """Whether it is a staging file."""
        return any(file.number == number for file in self._of_kind(STAGING))

    def take_home(self, number: int, first_byte: int, content: memoryview) -> None:
        """Write what a rank has written of a staging file to the notebook's."""
        for file in self._of_kind(STAGING):
            if file.number == number:
                memfd.write_at(file.descriptor, content, first_byte)

    def forget_arenas(self, arena_keys: Iterable[str]) -> list[int]:
        """Drop arenas; returns their numbers."""
        numbers = {self._arena_keys.pop(key) for key in arena_keys if key in self._arena_keys}
        return self._drop(file for file in self._files.values() if file.number in numbers)

    def forget_staging(self) -> list[int]:
        """Drop all staging files; returns their numbers."""
        return self._drop(self._of_kind(STAGING))

    def forget_old_payloads(self) -> list[int]:
        """Drop payloads that no rank will be sent again; returns their numbers."""
        payloads = [file for file in self._files.values() if file.kind not in (ARENA, STAGING)]
        return self._drop(payloads[:-_KEPT_PAYLOADS])

    def close(self) -> None:
        """Close all descriptors."""
        self._drop(self._files.values())

    def _of_kind(self, kind: str) -> list[_SharedFile]:
        return [file for file in tuple(self._files.values()) if file.kind == kind]

    def _drop(self, dropped_files: Iterable[_SharedFile]) -> list[int]:
        numbers = {file.number for file in dropped_files}
        for identity, file in tuple(self._files.items()):
            if file.number in numbers:
                del self._files[identity]
                os.close(file.descriptor)
        return sorted(numbers)
