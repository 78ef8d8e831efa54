from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from nbaccel.transfer import memfd
from nbaccel.transfer.memfd import PAGE_BYTES, Mapping
from nbaccel.transfer.weight_writer import LocalArena

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


def test_a_page_that_was_written_with_equal_values_has_not_changed(file_of: Files) -> None:
    num_bytes = 5 * PAGE_BYTES + 100  # the last page is not a whole one
    fd = file_of(num_bytes)
    mapping = Mapping(fd, num_bytes, is_private=True)
    mapping.bytes()[:] = 1
    mapping.bytes()[PAGE_BYTES] = 2
    mapping.bytes()[3 * PAGE_BYTES - 1] = 2
    assert LocalArena(fd, mapping).changed([(0, num_bytes)]) == [(PAGE_BYTES, 3 * PAGE_BYTES)]
    mapping.bytes()[-1] = 2
    assert LocalArena(fd, mapping).changed([(2 * PAGE_BYTES, num_bytes)]) == [
        (2 * PAGE_BYTES, 3 * PAGE_BYTES),
        (5 * PAGE_BYTES, num_bytes),
    ]


def test_what_was_not_written_is_not_looked_at(file_of: Files) -> None:
    fd = file_of(4 * PAGE_BYTES)
    mapping = Mapping(fd, 4 * PAGE_BYTES, is_private=True)
    mapping.bytes()[:] = 2
    assert LocalArena(fd, mapping).changed([]) == []
    assert LocalArena(fd, mapping).changed([(PAGE_BYTES, 2 * PAGE_BYTES)]) == [
        (PAGE_BYTES, 2 * PAGE_BYTES)
    ]


def test_of_much_a_block_whose_first_page_differs_counts_as_changed(file_of: Files) -> None:
    num_bytes = memfd._CLOSELY_COMPARED_BYTES + 4 * memfd._COMPARED_BYTES
    block = memfd._COMPARED_BYTES
    fd = file_of(num_bytes)
    mapping = Mapping(fd, num_bytes, is_private=True)
    mapping.bytes()[:] = 1
    mapping.bytes()[block] = 2  # in the first page of a block
    mapping.bytes()[3 * block + PAGE_BYTES] = 2  # in the second one
    assert LocalArena(fd, mapping).changed([(0, num_bytes)]) == [
        (block, 2 * block),
        (3 * block + PAGE_BYTES, 3 * block + 2 * PAGE_BYTES),
    ]
