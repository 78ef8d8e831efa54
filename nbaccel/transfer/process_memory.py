"""Weights that the notebook reads in a worker's own memory, with no staging file between.

    notebook's arena ◄──── process_vm_readv ──── private pages of rank 0, which waits meanwhile

Weights that no optimizer changed lie in pages that the worker wrote for itself. Writing them to a
staging file would take new memory for every page, which costs several copies; read where they lie,
each is copied once.

[Note: one call] A worker may be killed at any moment, and a model with half of the new weights is
useless. While a call of ``process_vm_readv(2)`` lasts it holds the other process's memory, even if
that process dies meanwhile; between two calls nothing does. So all that is read comes in a single
call, and what does not fit into one goes through the staging file.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbaccel.transfer import memfd

__all__ = [
    "MemoryPiece",
    "MemoryUnread",
    "changed_ranges",
    "different_runs",
    "equal_runs",
    "fit_in_one_call",
    "read_pieces",
]

_WORD_BYTES = 8
_CLOSELY_COMPARED_BYTES = 1 << 26
"""Of so much, every page is looked at; of more, one page of each block first."""
_BLOCK_PAGES = 64  # looking at one page in 64 costs a hundredth of copying all
_COMPARED_BYTES = 1 << 20  # compared at a time: small enough to stay in the cache


_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class MemoryUnread(OSError):
    """A worker's memory could not be read: nothing of it was copied, or with ``EIO`` a part."""


class MemoryPiece(NamedTuple):
    """Bytes of an arena whose new values lie in a worker's memory."""

    arena_key: str
    start: int
    """First byte in the arena."""
    end: int
    address: int
    """Of the first byte, in the worker."""


def changed_ranges(
    mapping: memfd.Mapping,
    file_descriptor: int,
    written_ranges: Sequence[memfd.ByteRange],
) -> list[memfd.ByteRange]:
    """What of the written pages differs from the arena: a page may be written with equal values.

    Args:
        mapping: A worker's private mapping of the arena.
        file_descriptor: The arena's file.
        written_ranges: What was written, in whole pages.

    Returns:
        The ranges without equal pages. Where much was written, some may be among them: only blocks
        whose first word is equal are looked through.
    """
    page_bytes = memfd.PAGE_BYTES
    is_small = memfd.total_bytes(written_ranges) <= _CLOSELY_COMPARED_BYTES
    block_bytes = page_bytes if is_small else page_bytes * _BLOCK_PAGES
    # A mapping of its own, because the worker's shows the worker's pages. Private, because the file
    # may be a checkpoint that is open for reading only; nothing is written through it.
    file_bytes = memfd.Mapping(file_descriptor, mapping.nbytes, is_private=True).bytes()
    own_bytes = mapping.bytes()
    kept_ranges: list[memfd.ByteRange] = []
    for first_byte, end_byte in written_ranges:
        equal_blocks = np.flatnonzero(
            _first_words(own_bytes, first_byte, end_byte, block_bytes)
            == _first_words(file_bytes, first_byte, end_byte, block_bytes)
        )
        equal_spans = (
            (block_start, min(block_start + block_bytes, end_byte))
            for block_start in (first_byte + equal_blocks * block_bytes).tolist()
        )
        equal_pages = equal_runs(own_bytes, file_bytes, memfd.merge_ranges(equal_spans))
        kept_ranges += memfd.ranges_without(
            [(first_byte, end_byte)], memfd.merge_ranges(equal_pages)
        )
    return kept_ranges


def _first_words(
    some_bytes: _Bytes, first_byte: int, end_byte: int, block_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The first 8 bytes of each block, zeros after the end; shape `[blocks]`."""
    num_blocks = -(-(end_byte - first_byte) // block_bytes)
    whole_blocks = (end_byte - first_byte) // block_bytes
    words = np.zeros(num_blocks, np.uint64)
    whole_end = first_byte + whole_blocks * block_bytes
    words[:whole_blocks] = some_bytes[first_byte:whole_end].view(np.uint64)[
        :: block_bytes // _WORD_BYTES
    ]
    last_bytes = some_bytes[whole_end:end_byte][:_WORD_BYTES]
    words[whole_blocks:].view(np.uint8)[: last_bytes.size] = last_bytes
    return words


def equal_runs(
    own_bytes: _Bytes,
    notebook_bytes: _Bytes,
    page_spans: Sequence[memfd.ByteRange],
) -> Iterator[memfd.ByteRange]:
    """The runs of whole pages in these spans that are the same in both."""
    for span_start, span_end in page_spans:
        for first_byte in range(span_start, span_end, _COMPARED_BYTES):
            end_byte = min(first_byte + _COMPARED_BYTES, span_end)
            if np.array_equal(
                # Compared as 8-byte words: NumPy's array of results is an eighth as long then.
                _as_words(own_bytes[first_byte:end_byte]),
                _as_words(notebook_bytes[first_byte:end_byte]),
            ):
                yield first_byte, end_byte
                continue
            for low_byte in range(first_byte, end_byte, memfd.PAGE_BYTES):
                high_byte = min(low_byte + memfd.PAGE_BYTES, end_byte)
                if np.array_equal(
                    own_bytes[low_byte:high_byte], notebook_bytes[low_byte:high_byte]
                ):
                    yield low_byte, high_byte


def different_runs(own_bytes: _Bytes, notebook_bytes: _Bytes) -> Iterator[memfd.ByteRange]:
    """The runs of whole pages that are not the same in both."""
    return memfd.gaps_between(
        memfd.merge_ranges(equal_runs(own_bytes, notebook_bytes, [(0, own_bytes.size)])),
        own_bytes.size,
    )


def _as_words(raw_bytes: _Bytes) -> _Bytes:
    return raw_bytes.view(np.uint64) if raw_bytes.size % _WORD_BYTES == 0 else raw_bytes


def fit_in_one_call(
    memory_pieces: Iterable[MemoryPiece],
) -> tuple[list[MemoryPiece], list[MemoryPiece]]:
    """What is read in one call, and what has to go another way. See [Note: one call].

    Args:
        memory_pieces: Everything that is to be copied.

    Returns:
        The largest pieces, as much as one call takes; and the rest.
    """
    bytes_left = memfd.CALL_BYTES
    read_pieces: list[MemoryPiece] = []
    rest_pieces: list[MemoryPiece] = []
    for piece in sorted(memory_pieces, key=lambda piece: piece.start - piece.end):
        taken_bytes = min(piece.end - piece.start, bytes_left)
        if len(read_pieces) == memfd.CALL_RANGES:
            taken_bytes = 0
        bytes_left -= taken_bytes
        if taken_bytes:
            read_pieces.append(piece._replace(end=piece.start + taken_bytes))
        if piece.start + taken_bytes < piece.end:
            rest_pieces.append(
                piece._replace(start=piece.start + taken_bytes, address=piece.address + taken_bytes)
            )
    return read_pieces, rest_pieces


def read_pieces(
    process_id: int,
    memory_pieces: Sequence[MemoryPiece],
    arenas: Mapping[str, memfd.Mapping],
) -> None:
    """Copy the pieces from a process's memory into the notebook's arenas, in one call.

    Args:
        process_id: Whose memory it is.
        memory_pieces: What is read; as much as `fit_in_one_call` gives.
        arenas: The notebook's arenas, by key.

    Raises:
        MemoryUnread: Nothing was copied, as the process has ended; with ``EIO``: part of it,
            because the system took pages of the other process away meanwhile.
    """
    num_bytes = sum(piece.end - piece.start for piece in memory_pieces)
    byte_moves = [
        (arenas[piece.arena_key].address + piece.start, piece.address, piece.end - piece.start)
        for piece in memory_pieces
    ]
    try:
        copied_bytes = memfd.read_process(process_id, byte_moves)
    except OSError as error:
        raise MemoryUnread(error.errno, error.strerror) from error
    if copied_bytes != num_bytes:
        raise MemoryUnread(errno.EIO, f"only {copied_bytes} of {num_bytes} bytes could be read")
