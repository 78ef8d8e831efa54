"""Entries in shared memory: whole or not there, announced to sleepers, and nothing else held."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nbaccel.train import futex, shared_page
from nbaccel.train.announced_calls import Entry, encode_call
from nbaccel.train.shared_page import DATA_BYTES, SharedPage, page_bytes
from nbaccel.transfer import memfd
from tests.process import descriptors, forked

PLACE = b'["file.py", 3, "train"]'


def entry(call_number: int, text: str = "x") -> Entry:
    return Entry(call_number, encode_call("gather", text), PLACE)


@pytest.fixture
def page() -> Iterator[SharedPage]:
    descriptor = memfd.create_file("test", page_bytes(2))
    with memfd.closing_files(descriptor):
        yield SharedPage(descriptor, 2)


def never() -> None:
    pytest.fail("it had to wait")


def test_entries_of_two_calls_stand_side_by_side(page: SharedPage) -> None:
    assert page.read_call(0, 0) is None
    for call_number in (4, 5):
        page.write(0, entry(call_number))
        assert page.read_call(0, call_number) == entry(call_number)
    assert page.read_call(0, 4) == entry(4)
    page.write(0, entry(6))
    assert page.read_call(0, 4) is None
    assert page.read(0, 0) == entry(6)
    assert page.read_call(1, 4) is None  # another block


def test_data_goes_along_in_aligned_pieces(page: SharedPage) -> None:
    pieces = [memoryview(b"abc"), memoryview(b"d" * 65), memoryview(b"ef")]
    page.write(1, entry(0), pieces)
    found = page.await_call(1, 0, never)
    assert found.data is not None
    data = bytes(found.data)
    assert (data[:3], data[64:129], data[192:194]) == (b"abc", b"d" * 65, b"ef")
    page.write(1, entry(2), [])
    assert page.await_call(1, 2, never).data == b""
    page.write(1, entry(4))
    assert page.await_call(1, 4, never).data is None


def test_the_most_data_fits_beside_the_longest_texts(page: SharedPage) -> None:
    longest = next(
        made for length in range(1 << 16, 0, -1) if page.has_room(made := entry(1, "x" * length))
    )
    page.write(0, longest, [memoryview(b"y" * DATA_BYTES)])
    page.write(0, entry(0))  # before it, in the same block
    page.write(1, entry(0))  # after it
    found = page.await_call(0, 1, never)
    assert found.call_text == longest.call_text
    assert found.data == b"y" * DATA_BYTES


@pytest.mark.parametrize("ordered", [True, False])
def test_an_entry_of_which_a_byte_is_missing_is_not_there_yet(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """Data counts where a processor may show it later than what was written after it."""
    monkeypatch.setattr(shared_page, "_IS_ORDERED", ordered)
    data = b"z" * 100
    page.write(0, entry(2), [memoryview(data)])
    start = shared_page._HEADER_BYTES
    length = start + shared_page._ENTRY.size + len(entry(2).call_text + PLACE)
    seen = {}
    for place in range(start, start + 500):
        before = page._memory[place]
        page._memory[place] = before ^ 0xFF
        seen[place] = page.read_call(0, 2) is not None
        page._memory[place] = before
    assert not any(seen[place] for place in range(start, length))
    first_data = start + shared_page._data_start(entry(2))
    assert all(seen[place] is ordered for place in range(first_data, first_data + len(data)))
    assert page.read_call(0, 2) is not None


@pytest.mark.parametrize("can_sleep", [True, False])
def test_a_waiting_process_finds_what_comes_late(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch, can_sleep: bool
) -> None:
    """Also where the system cannot wake it up."""
    assert futex.is_available()
    page._can_sleep = can_sleep

    reader, writer = os.pipe()

    def come_late() -> None:
        os.read(reader, 1)
        page.write(1, entry(7))

    child = forked(come_late)
    # It has slept and looked around before the other one begins.
    assert page.await_call(1, 7, lambda: os.write(writer, b"x")) == entry(7)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)


def test_what_is_called_while_waiting_can_end_it(page: SharedPage) -> None:
    def end() -> None:
        raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        page.await_call(1, 0, end)


def test_a_process_that_ended_or_said_so_has_left(page: SharedPage) -> None:
    page.sign(0, b"t" * 16)
    assert not page.has_left(0)
    assert not page.has_left(1)  # nobody has signed yet

    def sign_and_end() -> None:
        page.sign(1, b"u" * 16)
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(sign_and_end)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert page.token(1) == b"u" * 16
    assert page.has_left(1)  # still a zombie
    os.waitpid(child, 0)
    assert page.has_left(1)
    page.close(0)
    assert page.has_left(0)


def test_a_later_process_of_the_same_number_is_another_one(page: SharedPage) -> None:
    page.sign(0, b"t" * 16)
    process_id, start_ticks = page._writer(0)
    shared_page._WHO.pack_into(page._memory, shared_page._WHO_AT, process_id, start_ticks - 1)
    assert page.has_left(0)


def test_a_forked_child_does_not_leave_for_its_parent(page: SharedPage) -> None:
    page.sign(0, b"t" * 16)
    os.waitpid(forked(lambda: page.close(0)), 0)
    assert not page.has_left(0)


def test_a_page_keeps_no_file_open() -> None:
    before = descriptors()
    descriptor = memfd.create_file("test", page_bytes(1))
    page = SharedPage(descriptor, 1)
    os.close(descriptor)
    page.write(0, entry(0))
    assert page.await_call(0, 0, never) == entry(0)
    assert descriptors().keys() == before.keys()
