"""Copies of memory files on another host.

    notebook's file                        host's copy                     gets there, and back
    arena, or a checkpoint's file   ──►    one, however many ranks map it  what is not zero; later
                                                                           what has changed since
    staging file                    ──►    one, empty                      nothing
                                    ◄──                                    what a rank wrote of it
    payloads, long messages         ◄─►    one                             all of it

The kind of a file is in its name: memory files have one, which only people and this module read.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from nbaccel.hosts import wire_frames
from nbaccel.hosts.secure_link import CHUNK_BYTES, FileBytes
from nbaccel.transfer import memfd

__all__ = ["ARENA", "ReceivedFiles", "SentFiles", "file_kind", "passing_frames", "range_frames"]

ARENA = "arena"
STAGING = "staging"
_KEPT_PAYLOADS = 8
"""A payload is sent to one rank after the other; further ones are not needed again."""
_MEMORY_FILE = re.compile(r"/memfd:nbaccel-(\S+) \(deleted\)$")


def file_kind(file_descriptor: int) -> str:
    """What a file is for: `arena`, `staging`, `payload`, `message`."""
    file = _MEMORY_FILE.match(str(Path(f"/proc/self/fd/{file_descriptor}").readlink()))
    # A file on disk is a checkpoint whose tensors are mapped: an arena like any other.
    return file[1] if file else ARENA


@dataclass
class _SentFile:
    number: int
    descriptor: int
    kind: str
    num_bytes: int
    ticket: str = ""
    """Under which the host has been handed its first content by the engine."""
    digests: dict[int, int] = field(default_factory=dict)
    """First byte of a piece → digest of what was sent; pieces that were zero have none."""

    def first_frames(self) -> Iterator[wire_frames.NewFile | FileBytes]:
        """The file, and what is not zero in it; of a staging file, which ranks fill, nothing."""
        yield wire_frames.NewFile(self.number, self.kind, self.num_bytes, self.ticket)
        if self.ticket:
            # Not sent: only the digests are taken, to find later changes by.
            for _ in self.changed_frames():
                continue
        elif self.kind != STAGING:
            yield from self._piece_frames(_data_ranges(self.descriptor, self.num_bytes))

    def changed_frames(self) -> Iterator[FileBytes]:
        """What is different from what was sent."""
        return self._piece_frames([(0, self.num_bytes)])

    def _piece_frames(self, byte_ranges: Iterable[memfd.ByteRange]) -> Iterator[FileBytes]:
        for first_byte, content in _pieces(self.descriptor, self.num_bytes, byte_ranges):
            if self.kind == ARENA:
                digest = xxhash.xxh3_64_intdigest(content)
                known_digest = self.digests.get(first_byte, _zero_digest(len(content)))
                if digest == known_digest:
                    continue
                self.digests[first_byte] = digest
            yield FileBytes(
                file=self.number,
                offset=first_byte,
                content=content,
                is_weights=self.kind == ARENA,
            )


class SentFiles:
    """The notebook's files that one host has copies of, or is about to."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _SentFile] = {}
        self._numbers = itertools.count(0, 2)
        self._tickets: dict[tuple[int, int], str] = {}
        self._arena_keys: dict[str, int] = {}

    def note_carried(self, file_descriptor: int, ticket: str) -> None:
        """Note that the host has been handed a copy of a file that is about to be shared."""
        self._tickets[memfd.file_identity(file_descriptor)] = ticket

    def share(self, file_descriptor: int) -> tuple[int, Iterator[wire_frames.NewFile | FileBytes]]:
        """Have a file copied, unless it was."""
        identity = memfd.file_identity(file_descriptor)
        file = self._files.get(identity)
        if file is not None:
            return file.number, iter(())
        sent_file = _SentFile(
            number=next(self._numbers),
            # Open as long as the copy is there: the system could give its number to another file.
            descriptor=os.dup(file_descriptor),
            kind=file_kind(file_descriptor),
            num_bytes=os.fstat(file_descriptor).st_size,
            ticket=self._tickets.pop(identity, ""),
        )
        self._files[identity] = sent_file
        return sent_file.number, sent_file.first_frames()

    def name_arenas(self, arena_keys: Sequence[str], file_numbers: Sequence[int]) -> None:
        """Note the keys of arenas that were just shared."""
        self._arena_keys.update(zip(arena_keys, file_numbers, strict=True))

    def changes(self) -> Iterator[FileBytes]:
        """What the notebook has written to its arenas since they were sent."""
        # Those of now: what is shared later is not there yet when these frames are sent.
        return itertools.chain.from_iterable(
            [file.changed_frames() for file in self._of_kind(ARENA)]
        )

    def kind(self, file_number: int) -> str:
        """What a file is for."""
        return self._by_number(file_number).kind

    def take_home(self, piece: FileBytes) -> None:
        """Write what a rank has written of a staging file to the notebook's."""
        file = self._by_number(piece.file)
        # Other files are the notebook's own, which no host may write to.
        if file.kind != STAGING or piece.offset + len(piece.content) > file.num_bytes:
            raise ConnectionError(f"bytes came for file {piece.file}, which no host may write to")
        memfd.write_at(file.descriptor, piece.content, piece.offset)

    def forget_arenas(self, arena_keys: Iterable[str]) -> tuple[int, ...]:
        """Drop arenas; returns their numbers."""
        numbers = {
            self._arena_keys.pop(arena_key)
            for arena_key in arena_keys
            if arena_key in self._arena_keys
        }
        return self._drop(file for file in self._files.values() if file.number in numbers)

    def forget_staging(self) -> tuple[int, ...]:
        """Drop all staging files; returns their numbers."""
        return self._drop(self._of_kind(STAGING))

    def forget_old_payloads(self) -> tuple[int, ...]:
        """Drop payloads that no rank will be sent again; returns their numbers."""
        payloads = [file for file in self._files.values() if file.kind not in (ARENA, STAGING)]
        return self._drop(payloads[:-_KEPT_PAYLOADS])

    def close(self) -> None:
        """Close all descriptors."""
        self._drop(self._files.values())

    def _of_kind(self, kind: str) -> list[_SentFile]:
        return [file for file in self._files.values() if file.kind == kind]

    def _by_number(self, file_number: int) -> _SentFile:
        for file in self._files.values():
            if file.number == file_number:
                return file
        raise ConnectionError(f"bytes came for file {file_number}, which is not known")

    def _drop(self, dropped_files: Iterable[_SentFile]) -> tuple[int, ...]:
        numbers = []
        for sent_file in list(dropped_files):
            numbers.append(sent_file.number)
            self._files = {
                identity: kept_file
                for identity, kept_file in self._files.items()
                if kept_file is not sent_file
            }
            os.close(sent_file.descriptor)
        return tuple(numbers)


class ReceivedFiles:
    """Files that have come from the other side, by number."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def create(self, new_file: wire_frames.NewFile) -> None:
        """Make the copy of a file, all zero."""
        self._files[new_file.number] = memfd.create_file(new_file.name, new_file.num_bytes)

    def adopt(self, file_number: int, file_descriptor: int) -> None:
        """Take a copy over that came by another way."""
        self._files[file_number] = file_descriptor

    def write(self, piece: FileBytes) -> None:
        """Write a piece of a file that has been made."""
        memfd.write_at(self._files[piece.file], piece.content, piece.offset)

    def holds(self, file_number: int) -> bool:
        """Whether there is such a file."""
        return file_number in self._files

    def descriptor(self, file_number: int) -> int:
        """The descriptor of a file."""
        return self._files[file_number]

    def take(self, file_number: int) -> int:
        """The descriptor of a file, which is the caller's from now on."""
        return self._files.pop(file_number)

    def forget(self, file_numbers: Iterable[int]) -> None:
        """Close these files."""
        for file_number in file_numbers:
            file_descriptor = self._files.pop(file_number, None)
            if file_descriptor is not None:
                os.close(file_descriptor)

    def close(self) -> None:
        """Close all files."""
        self.forget(tuple(self._files))


def passing_frames(
    file_number: int, file_descriptor: int
) -> Iterator[wire_frames.NewFile | FileBytes]:
    """All of a file that is sent once; the descriptor is closed at the end."""
    with memfd.closing_files(file_descriptor):
        num_bytes = os.fstat(file_descriptor).st_size
        kind = file_kind(file_descriptor)
        yield wire_frames.NewFile(file_number, kind, num_bytes)
        for first_byte, content in _pieces(
            file_descriptor, num_bytes, _data_ranges(file_descriptor, num_bytes)
        ):
            yield FileBytes(
                file=file_number,
                offset=first_byte,
                content=content,
                is_weights=kind == STAGING,
            )


def range_frames(
    file_number: int, file_descriptor: int, byte_ranges: Iterable[memfd.ByteRange]
) -> Iterator[FileBytes]:
    """Exactly these bytes of a staging file."""
    num_bytes = os.fstat(file_descriptor).st_size
    for first_byte, end_byte in byte_ranges:
        # By the file's own data: what was never written is zero on the other side, too.
        for offset, content in _pieces(file_descriptor, num_bytes, [(first_byte, end_byte)]):
            yield FileBytes(file=file_number, offset=offset, content=content, is_weights=True)


def _pieces(
    file_descriptor: int, num_bytes: int, byte_ranges: Iterable[memfd.ByteRange]
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of ranges in pieces that fit into a frame, each within one aligned chunk."""
    if not num_bytes:
        return
    with contextlib.suppress(BufferError):  # a piece is on its way: unmapped with the last one
        with mmap.mmap(file_descriptor, num_bytes, access=mmap.ACCESS_READ) as file:
            for first_byte, end_byte in byte_ranges:
                piece_start = first_byte
                while piece_start < end_byte:
                    next_chunk = piece_start // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES
                    piece_end = min(end_byte, next_chunk)
                    yield piece_start, memoryview(file)[piece_start:piece_end]
                    piece_start = piece_end


def _data_ranges(file_descriptor: int, num_bytes: int) -> Iterator[memfd.ByteRange]:
    """What of a sparse file was ever written, in whole aligned chunks."""
    next_byte = 0
    while next_byte < num_bytes:
        try:
            first_byte = os.lseek(file_descriptor, next_byte, os.SEEK_DATA)
        except OSError:  # ENXIO: there is no data behind
            return
        end_byte = os.lseek(file_descriptor, first_byte, os.SEEK_HOLE)
        # Whole chunks, so that digests are of the same pieces each time.
        first_byte = max(next_byte, first_byte // CHUNK_BYTES * CHUNK_BYTES)
        end_byte = min(num_bytes, -(-end_byte // CHUNK_BYTES) * CHUNK_BYTES)
        yield first_byte, end_byte
        next_byte = end_byte


def _zero_digest(num_bytes: int) -> int:
    """The digest of so many bytes of zero."""
    if num_bytes not in _ZERO_DIGESTS:
        _ZERO_DIGESTS[num_bytes] = xxhash.xxh3_64_intdigest(bytes(num_bytes))
    return _ZERO_DIGESTS[num_bytes]


_ZERO_DIGESTS: dict[int, int] = {}
