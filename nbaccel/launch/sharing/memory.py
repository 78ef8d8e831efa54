"""Anonymous memory files (memfd), the mappings of them, and which pages of a mapping were written.

This file knows bytes and addresses only. What lies in them is `arena.py`'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
_PROT = 0x1 | 0x2  # read, write; the mmap module has no such names on Windows
_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>; the mmap module does not export it
_MAP_NORESERVE = 0x4000
_COPY_BYTES = 1 << 28  # one write(2) moves at most 2 GiB; smaller steps let an interrupt through

_ENTRIES = 1 << 15  # of the page table, read at a time: small enough to stay in the cache


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library, with the arguments' types; loaded at first use, as Windows cannot load it."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


Range = tuple[int, int]
"""Bytes `[start, stop)` of a file or mapping."""


def create_file(name: str, nbytes: int) -> int:
    """Create an anonymous memory file of `nbytes` bytes and return its descriptor.

    The file has no name in any directory, is not bounded by the size of /dev/shm, and is gone with
    the last process that holds it. Pages cost memory only once they are written.
    """
    fd = os.memfd_create(f"nbaccel-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(nbytes, 1))
    except BaseException:  # no descriptor is lost to an interrupt either
        os.close(fd)
        raise
    return fd


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the file at `offset` (bytes)."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done : done + _COPY_BYTES], offset + done)


def read_at(fd: int, into: memoryview, offset: int) -> None:
    """Fill all of `into` from the file at `offset` (bytes).

    Raises:
        EOFError: If the file ends before `into` is full.
    """
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done : done + _COPY_BYTES]], offset + done)
        if count == 0:
            raise EOFError(f"the memory file ended at byte {offset + done}")
        done += count


class Mapping:
    """A memory file mapped into this process.

    A *shared* mapping writes to the file. A *private* one reads the file's pages and keeps what it
    writes to itself (copy on write), so many readers cost one copy and no writer disturbs another.

    Whoever views the bytes (through `view` or `bytes`) keeps the mapping alive: it is unmapped when
    the last view is gone. That is why there is no `close`.
    """

    def __init__(self, fd: int, nbytes: int, *, private: bool) -> None:
        self.nbytes = nbytes
        self.address = 0  # so that __del__ has it to look at when the next line raises
        self.address = _map(fd, nbytes, _flags(private))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes as a writable uint8 array of shape `[nbytes]` that keeps the mapping alive."""
        return np.asarray(self)

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes `[start, stop)` as a writable memoryview that keeps the mapping alive."""
        return memoryview(self.bytes().data)[start:stop]

    def replace(self, fd: int, *, private: bool) -> None:
        """Put another file of the same size under the same addresses, in one step.

        Every tensor that lives here keeps its address and sees the other file's bytes from now on.
        """
        _map(fd, self.nbytes, _flags(private) | _MAP_FIXED, self.address)

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether `nbytes` bytes at `address` lie inside this mapping."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def written(self) -> list[Range]:
        """Which bytes of a private mapping were written since it was made, in whole pages."""
        return [
            (start, min(stop, self.nbytes)) for start, stop in _own_pages(self.address, self.nbytes)
        ]

    def give_back(self, start: int, stop: int) -> None:
        """Drop what a private mapping has written to these whole pages: it sees the file's again.

        Args:
            start: First byte, at the start of a page.
            stop: One past the last byte: the end of a page, or of the mapping.
        """
        if _libc().madvise(self.address + start, stop - start, mmap.MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, f"giving back bytes {start} to {stop}: {os.strerror(code)}")

    def __del__(self) -> None:
        if self.address:
            _libc().munmap(self.address, self.nbytes)


def _flags(private: bool) -> int:
    return (mmap.MAP_PRIVATE | _MAP_NORESERVE) if private else mmap.MAP_SHARED


def _map(fd: int, nbytes: int, flags: int, address: int | None = None) -> int:
    found = _libc().mmap(address, nbytes, _PROT, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes of shared memory: {os.strerror(code)}")
    return int(found)


def _own_pages(address: int, nbytes: int) -> list[Range]:
    """Ranges of pages that a private file mapping no longer shares with its file.

    Linux, Documentation/admin-guide/mm/pagemap: bit 63 says present, bit 62 swapped, bit 61 "page
    of a file or shared". A page copied on write is present (or swapped) without bit 61. Where the
    table cannot be read (some sandboxes have none), everything counts as written.
    """
    pages = -(-nbytes // PAGE_BYTES)
    found: list[Range] = []
    try:
        table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [(0, pages * PAGE_BYTES)]
    with closing(table):
        entries = np.empty(min(pages, _ENTRIES), dtype=np.uint64)
        for first in range(0, pages, _ENTRIES):
            chunk = entries[: min(_ENTRIES, pages - first)]
            offset = (address // PAGE_BYTES + first) * 8
            if os.preadv(table, [chunk.data], offset) != chunk.nbytes:
                return [(0, pages * PAGE_BYTES)]
            if chunk.any():  # nothing mapped yet: the common case of an untouched model
                found += _runs(chunk, first)
    return merge(found)


def _runs(entries: np.ndarray[Any, np.dtype[np.uint64]], first: int) -> list[Range]:
    """Ranges of pages that are present or swapped, and no file's."""
    flags = (entries >> np.uint64(61)).astype(np.uint8)
    own = ((flags & 0b110) != 0) & ((flags & 0b001) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], own, [False])).astype(np.int8)))
    return [
        ((first + int(start)) * PAGE_BYTES, (first + int(stop)) * PAGE_BYTES)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Sort the ranges and join those that touch or overlap."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def gaps(ranges: Iterable[Range], nbytes: int) -> Iterator[Range]:
    """What of `[0, nbytes)` no range covers. The ranges must be merged."""
    at = 0
    for start, stop in ranges:
        if at < start:
            yield (at, start)
        at = stop
    if at < nbytes:
        yield (at, nbytes)


def total(ranges: Iterable[Range]) -> int:
    """Bytes in all ranges together."""
    return sum(stop - start for start, stop in ranges)


def close_all(fds: Iterable[int]) -> None:
    """Close the descriptors."""
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def closing(*fds: int) -> Iterator[None]:
    """Close the descriptors on the way out, whatever happens."""
    try:
        yield
    finally:
        close_all(fds)
