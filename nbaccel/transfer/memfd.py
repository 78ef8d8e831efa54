"""Anonymous memory files (memfd), the mappings of them, and which pages of a mapping were written.

This file knows bytes and addresses only. What lies in them is `arena.py`'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbaccel.base import mapped_files

PAGE_BYTES = mmap.PAGESIZE
_READ_WRITE = 0x1 | 0x2  # read, write; the mmap module has no such names on Windows
_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>; the mmap module does not export it
_MAP_NORESERVE = 0x4000
_COPY_BYTES = 1 << 28  # one write(2) moves at most 2 GiB; smaller steps let an interrupt through

_PAGE_ENTRIES_READ = 1 << 15  # of the page table, read at a time: small enough to stay in the cache
_WORD_BYTES = 8
_CLOSELY_COMPARED_BYTES = 1 << 26
"""Of so much, every page is looked at; of more, one page of each block first."""
_BLOCK_PAGES = 64  # looking at one page in 64 costs a hundredth of copying all
_COMPARED_BYTES = 1 << 20  # compared at a time: small enough to stay in the cache

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def _c_library() -> ctypes.CDLL:
    """The C library, with the arguments' types; loaded at first use, as Windows cannot load it."""
    # ctypes keeps errno for this thread; Python may make other calls before it is read.
    c_library = ctypes.CDLL(None, use_errno=True)
    c_library.mmap.restype = ctypes.c_void_p
    c_library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    c_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    c_library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return c_library


ByteRange = tuple[int, int]
"""Bytes `[start, stop)` of a file or mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedObject:
    """What the receiver must know to open the memory file that travels with this record."""

    nbytes: int
    """Size of the file."""
    blocks: tuple[ByteRange, ...]
    """Where each out-of-band block lies, in the order in which the pickle refers to them."""
    pickle: ByteRange


def create_file(file_name: str, num_bytes: int) -> int:
    """Create an anonymous memory file of `num_bytes` bytes and return its descriptor.

    The file has no name in any directory, is not bounded by the size of /dev/shm, and is gone with
    the last process that holds it. Pages cost memory only once they are written.
    """
    file_descriptor = os.memfd_create(f"nbaccel-{file_name}", os.MFD_CLOEXEC)
    try:
        # An empty file cannot be mapped.
        os.ftruncate(file_descriptor, max(num_bytes, 1))
    except BaseException:  # an interrupt must not leak the descriptor either
        os.close(file_descriptor)
        raise
    return file_descriptor


def write_at(file_descriptor: int, source_bytes: memoryview, file_offset: int) -> None:
    """Write all of `source_bytes` to the file at `file_offset` (bytes)."""
    bytes_done = 0
    while bytes_done < source_bytes.nbytes:
        bytes_done += os.pwrite(
            file_descriptor,
            source_bytes[bytes_done : bytes_done + _COPY_BYTES],
            file_offset + bytes_done,
        )


def read_at(file_descriptor: int, target_bytes: memoryview, file_offset: int) -> None:
    """Fill all of `target_bytes` from the file at `file_offset` (bytes)."""
    bytes_done = 0
    while bytes_done < target_bytes.nbytes:
        bytes_read = os.preadv(
            file_descriptor,
            [target_bytes[bytes_done : bytes_done + _COPY_BYTES]],
            file_offset + bytes_done,
        )
        if bytes_read == 0:
            raise EOFError(f"the memory file ended at byte {file_offset + bytes_done}")
        bytes_done += bytes_read


class Mapping:
    """A memory file mapped into this process.

    A *shared* mapping writes to the file. A *private* one reads the file's pages and keeps what it
    writes to itself (copy on write), so many readers cost one copy and no writer disturbs another.

    Whoever views the bytes (through `view` or `bytes`) keeps the mapping alive: it is unmapped when
    the last view is gone. That is why there is no `close`.
    """

    def __init__(self, file_descriptor: int, num_bytes: int, *, is_private: bool) -> None:
        self.nbytes = num_bytes
        self.address = 0  # so that __del__ has it to look at when the next line raises
        self.address = _map_file(file_descriptor, num_bytes, _mapping_flags(is_private))
        self.identity = file_identity(file_descriptor)
        if is_private:
            mapped_files.register(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def bytes(self) -> _Bytes:
        """All bytes as a writable uint8 array of shape `[nbytes]` that keeps the mapping alive."""
        # NumPy's array refers to this object, so it keeps the mapping alive.
        return np.asarray(self)

    def view(self, first_byte: int, end_byte: int) -> memoryview:
        """Bytes `[start, stop)` as a writable memoryview that keeps the mapping alive."""
        return memoryview(self.bytes().data)[first_byte:end_byte]

    def replace(self, file_descriptor: int, *, is_private: bool) -> None:
        """Put another file of the same size under the same addresses, in one step.

        Every tensor that lives here keeps its address and sees the other file's bytes from now on.
        """
        _map_file(
            file_descriptor, self.nbytes, _mapping_flags(is_private) | _MAP_FIXED, self.address
        )
        self.identity = file_identity(file_descriptor)
        if is_private:
            mapped_files.register(self)
        else:
            mapped_files.forget_mapping(self)

    def advise(self, first_byte: int, end_byte: int, advice: int) -> None:
        """Tell the system what is about to happen to these bytes (``madvise(2)``)."""
        first_byte -= first_byte % PAGE_BYTES
        if _c_library().madvise(self.address + first_byte, end_byte - first_byte, advice):
            error_code = ctypes.get_errno()
            raise OSError(
                error_code, f"bytes {first_byte} to {end_byte}: {os.strerror(error_code)}"
            )

    def contains(self, start_address: int, num_bytes: int) -> bool:
        """Whether `num_bytes` bytes at `start_address` lie inside this mapping."""
        return (
            self.address <= start_address
            and start_address + num_bytes <= self.address + self.nbytes
        )

    def written(self, first_byte: int = 0, end_byte: int | None = None) -> list[ByteRange]:
        """Which bytes of a private mapping were written since it was made, in whole pages."""
        end_byte = self.nbytes if end_byte is None else end_byte
        return [
            (first_byte + start, min(first_byte + end, end_byte))
            for start, end in _own_pages(self.address + first_byte, end_byte - first_byte)
        ]

    def give_back(self, first_byte: int, end_byte: int) -> None:
        """Drop what a private mapping has written to these pages: it sees the file's again."""
        if _c_library().madvise(
            self.address + first_byte, end_byte - first_byte, mmap.MADV_DONTNEED
        ):
            error_code = ctypes.get_errno()
            raise OSError(
                error_code,
                f"giving back bytes {first_byte} to {end_byte}: {os.strerror(error_code)}",
            )

    def __del__(self) -> None:
        # Not there where a subclass failed before it got this far, or while Python shuts down.
        if getattr(self, "address", 0) and _c_library is not None:
            _c_library().munmap(self.address, self.nbytes)


def file_identity(file_descriptor: int) -> tuple[int, int]:
    """Device and inode: equal for descriptors of one file, as long as it is open."""
    file_status = os.fstat(file_descriptor)
    return file_status.st_dev, file_status.st_ino


def _mapping_flags(is_private: bool) -> int:
    # A private mapping reserves no swap, because most of its pages are never written.
    return (mmap.MAP_PRIVATE | _MAP_NORESERVE) if is_private else mmap.MAP_SHARED


def _map_file(
    file_descriptor: int, num_bytes: int, page_flags: int, start_address: int | None = None
) -> int:
    mapped_address = _c_library().mmap(
        start_address, num_bytes, _READ_WRITE, page_flags, file_descriptor, 0
    )
    if mapped_address is None or mapped_address == ctypes.c_void_p(-1).value:
        error_code = ctypes.get_errno()
        raise OSError(
            error_code, f"mapping {num_bytes} bytes of shared memory: {os.strerror(error_code)}"
        )
    return int(mapped_address)


def _own_pages(start_address: int, num_bytes: int) -> list[ByteRange]:
    """Ranges of pages that a private file mapping no longer shares with its file.

    Linux, Documentation/admin-guide/mm/pagemap: bit 63 means present, bit 62 swapped, bit 61 "page
    of a file or shared". A page copied on write is present (or swapped) without bit 61. Where the
    table cannot be read (some sandboxes have none), everything counts as written.
    """
    num_pages = -(-num_bytes // PAGE_BYTES)
    ranges: list[ByteRange] = []
    try:
        pagemap_fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [(0, num_pages * PAGE_BYTES)]
    with closing_files(pagemap_fd):
        page_entries = np.empty(min(num_pages, _PAGE_ENTRIES_READ), dtype=np.uint64)
        for first_page in range(0, num_pages, _PAGE_ENTRIES_READ):
            entry_chunk = page_entries[: min(_PAGE_ENTRIES_READ, num_pages - first_page)]
            file_offset = (start_address // PAGE_BYTES + first_page) * 8
            if os.preadv(pagemap_fd, [entry_chunk.data], file_offset) != entry_chunk.nbytes:
                return [(0, num_pages * PAGE_BYTES)]
            if entry_chunk.any():  # nothing mapped yet: the common case of an untouched model
                ranges += _own_page_runs(entry_chunk, first_page)
    return merge_ranges(ranges)


def _own_page_runs(
    entries: np.ndarray[Any, np.dtype[np.uint64]], first_page: int
) -> list[ByteRange]:
    """Ranges of pages that are present or swapped, and no file's."""
    page_flags = (entries >> np.uint64(61)).astype(np.uint8)
    pages = ((page_flags & 0b110) != 0) & ((page_flags & 0b001) == 0)
    run_edges = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False])).astype(np.int8)))
    return [
        ((first_page + int(first_byte)) * PAGE_BYTES, (first_page + int(end_byte)) * PAGE_BYTES)
        for first_byte, end_byte in zip(run_edges[::2], run_edges[1::2], strict=True)
    ]


def merge_ranges(byte_ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Sort the ranges and join those that touch or overlap."""
    joined_ranges: list[ByteRange] = []
    for first_byte, end_byte in sorted(byte_ranges):
        if joined_ranges and first_byte <= joined_ranges[-1][1]:
            joined_ranges[-1] = (joined_ranges[-1][0], max(end_byte, joined_ranges[-1][1]))
        else:
            joined_ranges.append((first_byte, end_byte))
    return joined_ranges


def ranges_without(
    byte_ranges: Iterable[ByteRange], left_out: Iterable[ByteRange]
) -> Iterator[ByteRange]:
    """What of the ranges is in none of those left out."""
    merged_ranges = merge_ranges(left_out)
    for first_byte, end_byte in byte_ranges:
        next_byte = first_byte
        for left_start, left_end in merged_ranges:
            if left_end <= next_byte or end_byte <= left_start:
                continue
            if next_byte < left_start:
                yield (next_byte, left_start)
            next_byte = left_end
        if next_byte < end_byte:
            yield (next_byte, end_byte)


def total_bytes(byte_ranges: Iterable[ByteRange]) -> int:
    """Bytes in all ranges together."""
    return sum(end_byte - first_byte for first_byte, end_byte in byte_ranges)


# ------------------------------------------------------------------------- equal pages


def changed_ranges(
    mapping: Mapping,
    file_descriptor: int,
    written_ranges: Sequence[ByteRange],
) -> list[ByteRange]:
    """What of the written pages differs from the arena: a page may be written with equal values."""
    is_small = total_bytes(written_ranges) <= _CLOSELY_COMPARED_BYTES
    block_bytes = PAGE_BYTES if is_small else PAGE_BYTES * _BLOCK_PAGES
    # A mapping of its own, because the worker's shows the worker's pages. Private, because the file
    # may be a checkpoint that is open for reading only; nothing is written through it.
    file_bytes = Mapping(file_descriptor, mapping.nbytes, is_private=True).bytes()
    own_bytes = mapping.bytes()
    kept_ranges: list[ByteRange] = []
    for first_byte, end_byte in written_ranges:
        equal_blocks = np.flatnonzero(
            _first_words(own_bytes, first_byte, end_byte, block_bytes)
            == _first_words(file_bytes, first_byte, end_byte, block_bytes)
        )
        equal_spans = (
            (block_start, min(block_start + block_bytes, end_byte))
            for block_start in (first_byte + equal_blocks * block_bytes).tolist()
        )
        equal_pages = equal_runs(own_bytes, file_bytes, merge_ranges(equal_spans))
        kept_ranges += ranges_without([(first_byte, end_byte)], equal_pages)
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
    page_spans: Sequence[ByteRange],
) -> Iterator[ByteRange]:
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
            for low_byte in range(first_byte, end_byte, PAGE_BYTES):
                high_byte = min(low_byte + PAGE_BYTES, end_byte)
                if np.array_equal(
                    own_bytes[low_byte:high_byte], notebook_bytes[low_byte:high_byte]
                ):
                    yield low_byte, high_byte


def _as_words(raw_bytes: _Bytes) -> _Bytes:
    return raw_bytes.view(np.uint64) if raw_bytes.size % _WORD_BYTES == 0 else raw_bytes


def close_all(file_descriptors: Iterable[int]) -> None:
    """Close the descriptors."""
    for file_descriptor in file_descriptors:
        os.close(file_descriptor)


@contextlib.contextmanager
def closing_files(*file_descriptors: int) -> Iterator[None]:
    """Close the descriptors on the way out, whatever happens."""
    try:
        yield
    finally:
        close_all(file_descriptors)
