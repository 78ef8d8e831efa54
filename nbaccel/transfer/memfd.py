"""Anonymous memory files (memfd), the mappings of them, and which pages of a mapping were written.

This file knows bytes and addresses only. What lies in them is `arena.py`'s business.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbaccel.base import mapped_files

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT = 64  # bytes: a cache line, and enough for every vector instruction torch uses
_READ_WRITE = 0x1 | 0x2  # read, write; the mmap module has no such names on Windows
_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>; the mmap module does not export it
_MAP_NORESERVE = 0x4000
_COPY_BYTES = 1 << 28  # one write(2) moves at most 2 GiB; smaller steps let an interrupt through

_COMPARED_BYTES = 1 << 20  # compared at a time: small enough to stay in the cache
_CLOSELY_COMPARED_BYTES = 1 << 26
_FILLED_BYTES = 1 << 26  # by one thread at a time

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def _c_library() -> ctypes.CDLL:
    """The C library, with the arguments' types; loaded at first use, as Windows cannot load it."""
    # ctypes keeps errno for this thread; Python may make other calls before it is read.
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


ByteRange = tuple[int, int]  # bytes `[start, end)` of a file or mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedObject:
    """What the receiver must know to open the memory file that travels with this record."""

    nbytes: int
    blocks: tuple[ByteRange, ...]  # the out-of-band blocks, in the pickle's order
    pickle: ByteRange


def aligned(num_bytes: int) -> int:
    """The size rounded up, so that what follows starts at an aligned address."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def create_file(name: str, num_bytes: int) -> int:
    """Create a memory file; pages of it cost memory only once they are written."""
    fd = os.memfd_create(f"nbaccel-{name}", os.MFD_CLOEXEC)
    with closed_on_error(fd):
        # An empty file cannot be mapped.
        os.ftruncate(fd, max(num_bytes, 1))
    return fd


def write_at(fd: int, source: memoryview, offset: int) -> None:
    """Write all of `source` to the file at `offset` (bytes)."""
    done = 0
    while done < source.nbytes:
        done += os.pwrite(fd, source[done : done + _COPY_BYTES], offset + done)


class Mapping:
    """A memory file mapped into this process, until the last view of it is gone."""

    def __init__(self, fd: int, num_bytes: int, *, is_private: bool, owns_fd: bool = False) -> None:
        self.nbytes = num_bytes
        self.fd = fd
        self._owns_fd = owns_fd  # it is closed with this mapping, which itself needs none
        self.address = 0
        self.replace(fd, is_private=is_private)

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

    def view(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)` as a writable memoryview that keeps the mapping alive."""
        return memoryview(self.bytes().data)[start:end]

    def fill(self, fd: int, spans: Iterable[ByteRange]) -> None:
        """Copy these bytes from a file of the same size; two threads take a quarter of ``read``."""
        target, source = self.bytes(), Mapping(fd, self.nbytes, is_private=True).bytes()
        parts = [slice(*piece) for piece in pieces(spans, _FILLED_BYTES)]
        with ThreadPoolExecutor(2) as threads:
            # NumPy lets both copy at once. To start them would take longer than one part does.
            run = threads.map if len(parts) > 1 else map
            list(run(lambda part: np.copyto(target[part], source[part]), parts))

    def replace(self, fd: int, *, is_private: bool) -> None:
        """Put another file of the same size under the same addresses, in one step."""
        # A private mapping reserves no swap, because most of its pages are never written.
        flags = (mmap.MAP_PRIVATE | _MAP_NORESERVE) if is_private else mmap.MAP_SHARED
        flags |= _MAP_FIXED if self.address else 0
        address = _c_library().mmap(self.address or None, self.nbytes, _READ_WRITE, flags, fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            text = f"mapping {self.nbytes} bytes of shared memory: {os.strerror(code)}"
            raise OSError(code, text)
        self.address = int(address)
        self.identity = file_identity(fd)
        if is_private:
            mapped_files.LIVING_MAPPINGS.add(self)
        else:
            mapped_files.LIVING_MAPPINGS.discard(self)

    def advise(self, start: int, end: int, advice: int) -> None:
        """Tell the system what is about to happen to these bytes (``madvise(2)``)."""
        start -= start % PAGE_BYTES
        if _c_library().madvise(self.address + start, end - start, advice):
            code = ctypes.get_errno()
            raise OSError(code, f"advising of bytes {start} to {end}: {os.strerror(code)}")

    def contains(self, address: int, num_bytes: int) -> bool:
        """Whether `num_bytes` bytes at `address` lie inside this mapping."""
        return self.address <= address and address + num_bytes <= self.address + self.nbytes

    def written(self, start: int = 0, end: int | None = None) -> list[ByteRange]:
        """Which pages of a private mapping were written; all where the system does not tell."""
        end = self.nbytes if end is None else end
        num_pages = -(-(end - start) // PAGE_BYTES)
        flags = np.full(num_pages, 2, dtype=np.uint8)
        # The same again and again: fresh memory would take several times what the reading does.
        entries = np.empty(1 << 13, dtype=np.uint64)
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb") as pagemap:
            for first in range(0, num_pages, len(entries)):
                at = ((self.address + start) // PAGE_BYTES + first) * 8
                num_read = os.preadv(pagemap.fileno(), [entries[: num_pages - first].data], at) // 8
                flags[first : first + num_read] = entries[:num_read] >> np.uint64(61)
        # Linux, admin-guide/mm/pagemap: present (bit 63) or swapped (62), no file's (61).
        is_own = (flags >= 2) & (flags & 1 == 0)
        return [
            (start + first * PAGE_BYTES, min(start + last * PAGE_BYTES, end))
            for first, last in _runs(is_own)
        ]

    def give_back(self, start: int, end: int) -> None:
        """Drop what a private mapping has written to these pages: it sees the file's again."""
        if start % PAGE_BYTES:  # a part of the page before would go, too
            raise OSError(errno.EINVAL, f"giving back bytes {start} to {end}: no start of a page")
        self.advise(start, end, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        # Names of this module are None while Python shuts down.
        if self.address and _c_library is not None:
            _c_library().munmap(self.address, self.nbytes)
        if self._owns_fd and os is not None:
            os.close(self.fd)


def file_identity(fd: int) -> tuple[int, int]:
    """Device and inode: equal for descriptors of one file, as long as it is open."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _runs(marks: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Where runs of true marks begin, and where they have ended."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], marks, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def merge_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Sort the ranges and join those that touch or overlap."""
    joined: list[ByteRange] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def ranges_without(
    ranges: Iterable[ByteRange], left_out: Iterable[ByteRange]
) -> Iterator[ByteRange]:
    """What of the ranges is in none of those left out."""
    merged = merge_ranges(left_out)
    starts = [low for low, _ in merged]
    ends = [high for _, high in merged]
    for start, end in ranges:
        next_byte = start
        for low, high in merged[bisect.bisect_right(ends, start) : bisect.bisect_left(starts, end)]:
            if next_byte < low:
                yield (next_byte, low)
            next_byte = high
        if next_byte < end:
            yield (next_byte, end)


def overlap(span: ByteRange, ranges: Iterable[ByteRange]) -> bool:
    """Whether some of these bytes are in one of the ranges."""
    return any(start < span[1] and span[0] < end for start, end in ranges)


def total_bytes(ranges: Iterable[ByteRange]) -> int:
    """Bytes in all ranges together."""
    return sum(end - start for start, end in ranges)


def pieces(spans: Iterable[ByteRange], num_bytes: int) -> Iterator[ByteRange]:
    """The same bytes in ranges of at most so many."""
    for low, high in spans:
        for start in range(low, high, num_bytes):
            yield start, min(start + num_bytes, high)


def equal_runs(own: _Bytes, theirs: _Bytes, spans: Sequence[ByteRange]) -> Iterator[ByteRange]:
    """The runs of whole pages in these spans that are the same in both."""
    is_much = total_bytes(spans) > _CLOSELY_COMPARED_BYTES
    for start, end in pieces(spans, _COMPARED_BYTES):
        first_page = slice(start, min(start + PAGE_BYTES, end))
        # A block whose first page differs counts as changed: a hundredth of copying it.
        if is_much and (own[first_page] != theirs[first_page]).any():
            continue
        pages = np.arange(0, end - start, PAGE_BYTES)
        differs = np.logical_or.reduceat(own[start:end] != theirs[start:end], pages)
        for first, last in _runs(~differs):
            yield start + first * PAGE_BYTES, min(start + last * PAGE_BYTES, end)


def close_all(fds: Iterable[int]) -> None:
    """Close the descriptors."""
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Close the descriptor where the block fails."""
    try:
        yield
    except BaseException:  # an interrupt must not leak it either
        os.close(fd)
        raise


@contextlib.contextmanager
def closing_files(*fds: int) -> Iterator[None]:
    """Close the descriptors on the way out, whatever happens."""
    try:
        yield
    finally:
        close_all(fds)
