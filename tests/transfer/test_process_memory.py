from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nbaccel.transfer import memfd, process_memory
from nbaccel.transfer.memfd import PAGE_BYTES, Mapping
from nbaccel.transfer.process_memory import MemoryPiece, MemoryUnread, changed_ranges

Files = Callable[[int], int]


@pytest.fixture
def file_of() -> Iterator[Files]:
    """Makes memory files of ones."""
    made = []

    def make(num_bytes: int) -> int:
        made.append(memfd.create_file("test", num_bytes))
        memfd.write_at(made[-1], memoryview(bytes([1]) * num_bytes), 0)
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


class Process:
    """A child with a private mapping of the file in which it has written 2 everywhere."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.mapping = Mapping(fd, num_bytes, is_private=True)
        told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.mapping.bytes()[:] = 2
            os.write(tell, b"w")
            signal.pause()
            os._exit(0)
        os.close(tell)
        assert os.read(told, 1) == b"w"
        os.close(told)

    def piece(self, start: int, end: int) -> MemoryPiece:
        return MemoryPiece("a", start, end, self.mapping.address + start)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


# ------------------------------------------------------------------------- which pages


def test_a_page_that_was_written_with_equal_values_has_not_changed(file_of: Files) -> None:
    num_bytes = 5 * PAGE_BYTES + 100  # the last page is not a whole one
    fd = file_of(num_bytes)
    mapping = Mapping(fd, num_bytes, is_private=True)
    mapping.bytes()[:] = 1
    mapping.bytes()[PAGE_BYTES] = 2
    mapping.bytes()[3 * PAGE_BYTES - 1] = 2
    assert changed_ranges(mapping, fd, [(0, num_bytes)]) == [(PAGE_BYTES, 3 * PAGE_BYTES)]
    mapping.bytes()[-1] = 2
    assert changed_ranges(mapping, fd, [(2 * PAGE_BYTES, num_bytes)]) == [
        (2 * PAGE_BYTES, 3 * PAGE_BYTES),
        (5 * PAGE_BYTES, num_bytes),
    ]


def test_what_was_not_written_is_not_looked_at(file_of: Files) -> None:
    fd = file_of(4 * PAGE_BYTES)
    mapping = Mapping(fd, 4 * PAGE_BYTES, is_private=True)
    mapping.bytes()[:] = 2
    assert changed_ranges(mapping, fd, []) == []
    assert changed_ranges(mapping, fd, [(PAGE_BYTES, 2 * PAGE_BYTES)]) == [
        (PAGE_BYTES, 2 * PAGE_BYTES)
    ]


def test_of_much_one_page_in_each_block_is_looked_at_first(
    file_of: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "_CLOSELY_COMPARED_BYTES", PAGE_BYTES)
    block = process_memory._BLOCK_PAGES * PAGE_BYTES
    fd = file_of(4 * block)
    mapping = Mapping(fd, 4 * block, is_private=True)
    own = mapping.bytes()
    own[:] = 1
    own[block + 5 * PAGE_BYTES] = 2  # a page inside a block whose first one is equal
    own[2 * block : 3 * block : PAGE_BYTES] = 2
    assert changed_ranges(mapping, fd, [(0, 4 * block)]) == [
        (block + 5 * PAGE_BYTES, block + 6 * PAGE_BYTES),
        (2 * block, 3 * block),
    ]


# ------------------------------------------------------------------------- one call


def test_the_largest_pieces_fit_in_one_call_and_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memfd, "CALL_RANGES", 2)
    monkeypatch.setattr(memfd, "CALL_BYTES", 1000)
    pieces = [
        MemoryPiece("a", 0, 10, 50),
        MemoryPiece("a", 100, 900, 5_000),
        MemoryPiece("b", 0, 400, 9_000),
    ]
    taken, rest = process_memory.fit_in_one_call(pieces)
    assert taken == [MemoryPiece("a", 100, 900, 5_000), MemoryPiece("b", 0, 200, 9_000)]
    assert rest == [MemoryPiece("b", 200, 400, 9_200), MemoryPiece("a", 0, 10, 50)]


def test_the_system_takes_as_much_in_one_call_as_is_said(file_of: Files) -> None:
    num_bytes = 2 * memfd.CALL_RANGES * PAGE_BYTES
    fd = file_of(num_bytes)
    arena, process = Mapping(fd, num_bytes, is_private=False), Process(fd, num_bytes)
    try:
        every_other = range(0, num_bytes, 2 * PAGE_BYTES)
        pieces = [process.piece(start, start + PAGE_BYTES) for start in every_other]
        assert len(pieces) == memfd.CALL_RANGES
        process_memory.read_pieces(process.pid, pieces, {"a": arena})
    finally:
        process.end()
    pages = arena.bytes().reshape(-1, PAGE_BYTES)
    assert (pages[::2] == 2).all()
    assert (pages[1::2] == 1).all()


def test_a_process_that_has_ended_leaves_all_as_it_was(file_of: Files) -> None:
    fd = file_of(PAGE_BYTES)
    arena, process = Mapping(fd, PAGE_BYTES, is_private=False), Process(fd, PAGE_BYTES)
    process.end()
    with pytest.raises(MemoryUnread) as caught:
        process_memory.read_pieces(process.pid, [process.piece(0, PAGE_BYTES)], {"a": arena})
    assert caught.value.errno == errno.ESRCH
    assert (arena.bytes() == 1).all()


def test_memory_that_is_gone_from_the_middle_is_told(file_of: Files) -> None:
    fd = file_of(2 * PAGE_BYTES)
    arena, process = Mapping(fd, 2 * PAGE_BYTES, is_private=False), Process(fd, 2 * PAGE_BYTES)
    unmapped = MemoryPiece("a", PAGE_BYTES, 2 * PAGE_BYTES, 0)
    try:
        with pytest.raises(MemoryUnread) as caught:
            process_memory.read_pieces(
                process.pid, [process.piece(0, PAGE_BYTES), unmapped], {"a": arena}
            )
    finally:
        process.end()
    assert caught.value.errno == errno.EIO
    assert f"only {PAGE_BYTES} of {2 * PAGE_BYTES} bytes" in str(caught.value)


def test_a_process_that_is_killed_while_it_is_read_gives_all_or_nothing(file_of: Files) -> None:
    """[Note: one call]: at moments that nobody has chosen, most of them inside the call."""
    num_bytes = 32 << 20
    seen = set()
    for turn in range(8):
        fd = file_of(num_bytes)
        arena, process = Mapping(fd, num_bytes, is_private=False), Process(fd, num_bytes)
        killer = threading.Timer(0.0005 * turn, os.kill, [process.pid, signal.SIGKILL])
        killer.start()
        try:
            process_memory.read_pieces(process.pid, [process.piece(0, num_bytes)], {"a": arena})
            expected = 2
        except MemoryUnread:
            expected = 1
        killer.join()
        os.waitpid(process.pid, 0)
        assert (arena.bytes() == expected).all(), turn
        seen.add(expected)
    assert seen


# ------------------------------------------------------------------------- permission


def test_ones_own_child_may_be_read_and_one_that_is_gone_not(file_of: Files) -> None:
    process = Process(file_of(1), 1)
    assert memfd.can_read_process(process.pid)
    process.end()
    assert not memfd.can_read_process(process.pid)


def test_another_users_process_may_not_be_read() -> None:
    root_pid = 1
    if Path(f"/proc/{root_pid}").stat().st_uid != 0:
        pytest.skip("process 1 is not root's here")
    pid = os.fork()
    if pid == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        os._exit(int(memfd.can_read_process(root_pid)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_view_of_memory_shows_what_lies_there() -> None:
    with mmap.mmap(-1, PAGE_BYTES) as pages:
        numbers = np.frombuffer(pages, np.uint8)
        pages[7] = 9
        view = memfd.bytes_at(numbers.ctypes.data, 8)
        assert view.tolist() == [0, 0, 0, 0, 0, 0, 0, 9]
        del view, numbers
