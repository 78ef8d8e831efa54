"""Which pages of a worker differ from the notebook's: a page may be written with equal values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nbaccel.transfer import memfd

_WORD_BYTES = 8
_CLOSELY_COMPARED_BYTES = 1 << 26
"""Of so much, every page is looked at; of more, one page of each block first."""
_BLOCK_PAGES = 64  # looking at one page in 64 costs a hundredth of copying all
_COMPARED_BYTES = 1 << 20  # compared at a time: small enough to stay in the cache


_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def changed_ranges(
    mapping: memfd.Mapping,
    file_descriptor: int,
    written_ranges: Sequence[memfd.ByteRange],
) -> list[memfd.ByteRange]:
    """What of the written pages differs from the arena: a page may be written with equal values."""
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
        kept_ranges += memfd.ranges_without([(first_byte, end_byte)], equal_pages)
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


def _as_words(raw_bytes: _Bytes) -> _Bytes:
    return raw_bytes.view(np.uint64) if raw_bytes.size % _WORD_BYTES == 0 else raw_bytes
