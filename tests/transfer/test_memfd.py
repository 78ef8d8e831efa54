from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nbaccel.transfer import memfd
from nbaccel.transfer.memfd import PAGE_BYTES, Mapping
from nbaccel.transfer.received_modules import LocalArena
from tests.process import descriptors

PAGES = 8
NBYTES = (PAGES - 1) * PAGE_BYTES + 100  # the last page is not a whole one


@pytest.fixture
def file() -> Iterator[int]:
    fd = memfd.create_file("test", NBYTES)
    yield fd
    os.close(fd)


def read(fd: int, nbytes: int, offset: int = 0) -> bytes:
    return os.pread(fd, nbytes, offset)


def mapped_at(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text()
    return any(line.startswith(f"{address:x}-") for line in maps.splitlines())


def test_a_file_has_no_name_and_is_written_and_read_in_small_steps(file, monkeypatch):
    assert descriptors()[file] == "/memfd:nbaccel-test (deleted)"
    assert os.fstat(file).st_size == NBYTES
    assert os.fstat(file).st_blocks == 0, "a page costs nothing before it is written"
    assert not os.get_inheritable(file)

    monkeypatch.setattr(memfd, "_COPY_BYTES", 7)
    data = bytes(range(256))
    memfd.write_at(file, memoryview(data), 3)
    assert read(file, 256, 3) == data
    assert read(file, 3) == bytes(3)


def test_a_shared_mapping_writes_to_the_file_and_a_private_one_does_not(file):
    one, other = Mapping(file, NBYTES, is_private=True), Mapping(file, NBYTES, is_private=True)
    one.bytes()[:] = 1
    assert other.bytes().max() == 0
    assert read(file, NBYTES) == bytes(NBYTES)
    one.replace(file, is_private=True)
    assert one.bytes().max() == 0, "a private replacement forgets what was written"
    assert one.written() == []
    one, other = Mapping(file, NBYTES, is_private=False), Mapping(file, NBYTES, is_private=False)
    one.bytes()[NBYTES - 1] = 7
    assert other.bytes()[NBYTES - 1] == 7
    assert read(file, 1, NBYTES - 1) == b"\x07"
    assert one.written() == [] or one.written() == [(0, NBYTES)]


@pytest.mark.parametrize("at_a_time", [7, NBYTES])
def test_a_mapping_is_filled_from_a_file_in_exactly_these_bytes(file, at_a_time, monkeypatch):
    monkeypatch.setattr(memfd, "_FILLED_BYTES", at_a_time)
    data = np.random.default_rng(0).integers(1, 256, NBYTES, dtype=np.uint8)
    memfd.write_at(file, memoryview(data), 0)
    target = memfd.create_file("test", NBYTES)
    with memfd.closing_files(target):
        mapping = Mapping(target, NBYTES, is_private=False)
        mapping.fill(file, iter([(0, 10), (PAGE_BYTES - 1, 2 * PAGE_BYTES + 1), (50, 50)]))
        expected = np.zeros_like(data)
        for start, end in [(0, 10), (PAGE_BYTES - 1, 2 * PAGE_BYTES + 1)]:
            expected[start:end] = data[start:end]
        assert read(target, NBYTES) == expected.tobytes()
        mapping.fill(file, [(0, NBYTES)])
        assert read(target, NBYTES) == data.tobytes()


def test_a_private_mapping_knows_which_pages_it_wrote(file):
    memfd.write_at(file, memoryview(bytes([5]) * NBYTES), 0)
    mapping = Mapping(file, NBYTES, is_private=True)
    view = mapping.bytes()
    assert int(view.sum()) == 5 * NBYTES
    assert mapping.written() == [], "reading is not writing"
    view[2 * PAGE_BYTES + 17] = 5  # what it held already
    view[3 * PAGE_BYTES] = 1
    view[NBYTES - 1] = 1
    assert mapping.written() == [
        (2 * PAGE_BYTES, 4 * PAGE_BYTES),
        ((PAGES - 1) * PAGE_BYTES, NBYTES),
    ]


def test_another_file_takes_the_place_under_the_same_addresses_as_long_as_there_is_a_view(file):
    mapping = Mapping(file, NBYTES, is_private=False)
    tensor = torch.from_numpy(mapping.bytes())
    address = tensor.data_ptr()
    other = memfd.create_file("test", NBYTES)
    with memfd.closing_files(other):
        memfd.write_at(other, memoryview(b"\x09" * NBYTES), 0)
        mapping.replace(other, is_private=False)
    assert tensor.data_ptr() == address
    assert bool((tensor == 9).all())
    assert read(file, NBYTES) == bytes(NBYTES), "the old file is as it was"

    mapping = Mapping(file, NBYTES, is_private=False)
    address = mapping.address
    array, view = mapping.bytes(), mapping.view(10, 20)
    del mapping
    assert mapped_at(address)
    array[10] = 4
    del array
    assert view[0] == 4
    del view
    assert not mapped_at(address)


def test_merge_and_gaps_part_the_whole():
    random = np.random.default_rng(0)
    for _ in range(200):
        raw = [tuple(sorted(random.integers(0, 60, 2).tolist())) for _ in range(random.integers(6))]
        covered = {i for start, stop in raw for i in range(start, stop)}
        merged = [span for span in memfd.merge_ranges(raw) if span[0] < span[1]]
        left = list(memfd.ranges_without([(0, 60)], merged))
        assert {i for a, b in merged for i in range(a, b)} == covered
        assert {i for a, b in left for i in range(a, b)} == set(range(60)) - covered
        assert memfd.total_bytes(merged) == len(covered)
        assert memfd.total_bytes(left) == 60 - len(covered)


def test_pages_that_are_given_back_show_the_file_again():
    fd = memfd.create_file("test", 3 * PAGE_BYTES + 10)
    with memfd.closing_files(fd):
        memfd.write_at(fd, memoryview(b"file" * PAGE_BYTES)[: 3 * PAGE_BYTES + 10], 0)
        private = memfd.Mapping(fd, 3 * PAGE_BYTES + 10, is_private=True)
        private.view(0, private.nbytes)[:] = b"x" * private.nbytes
        private.give_back(PAGE_BYTES, 2 * PAGE_BYTES)
        private.give_back(3 * PAGE_BYTES, private.nbytes)
        assert bytes(private.view(PAGE_BYTES, PAGE_BYTES + 4)) == b"file"
        assert bytes(private.view(3 * PAGE_BYTES, private.nbytes)) == b"filefilefi"
        assert bytes(private.view(PAGE_BYTES - 1, PAGE_BYTES)) == b"x"
        with pytest.raises(OSError, match="giving back bytes 1 to"):
            private.give_back(1, PAGE_BYTES)


def filled(num_bytes: int, value: int) -> tuple[int, Mapping]:
    """A memory file of ones, and a mapping in which each byte was written."""
    fd = memfd.create_file("test", num_bytes)
    memfd.write_at(fd, memoryview(bytes([1]) * num_bytes), 0)
    mapping = Mapping(fd, num_bytes, is_private=True)
    mapping.bytes()[:] = value
    return fd, mapping


def test_a_page_has_changed_that_was_written_with_other_values():
    num_bytes = 5 * PAGE_BYTES + 100  # the last page is not a whole one
    fd, mapping = filled(num_bytes, 1)
    with memfd.closing_files(fd):
        changed = LocalArena(fd, mapping).changed
        mapping.bytes()[PAGE_BYTES] = 2
        mapping.bytes()[3 * PAGE_BYTES - 1] = 2
        assert changed([(0, num_bytes)]) == [(PAGE_BYTES, 3 * PAGE_BYTES)]
        mapping.bytes()[-1] = 2
        assert changed([(2 * PAGE_BYTES, num_bytes)]) == [
            (2 * PAGE_BYTES, 3 * PAGE_BYTES),
            (5 * PAGE_BYTES, num_bytes),
        ]
        assert changed([]) == [], "what was not written is not looked at"


def test_of_much_a_block_whose_first_page_differs_counts_as_changed():
    num_bytes = memfd._CLOSELY_COMPARED_BYTES + 4 * memfd._COMPARED_BYTES
    block = memfd._COMPARED_BYTES
    fd, mapping = filled(num_bytes, 1)
    with memfd.closing_files(fd):
        mapping.bytes()[block] = 2  # in the first page of a block
        mapping.bytes()[3 * block + PAGE_BYTES] = 2  # in the second one
        assert LocalArena(fd, mapping).changed([(0, num_bytes)]) == [
            (block, 2 * block),
            (3 * block + PAGE_BYTES, 3 * block + 2 * PAGE_BYTES),
        ]
