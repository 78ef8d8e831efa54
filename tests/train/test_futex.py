from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

import pytest

from nbaccel.train import futex
from tests.process import forked


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What is known of this system is found out anew, before and after."""
    for cached in (futex.is_available, futex._call_number):
        cached.cache_clear()
    yield
    for cached in (futex.is_available, futex._call_number):
        cached.cache_clear()


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = ctypes.c_uint32(1)
    begin = time.monotonic()
    futex.wait(ctypes.addressof(word), 0, 60)
    assert time.monotonic() - begin < 30


def test_a_wait_that_nobody_ends_ends_by_itself() -> None:
    word = ctypes.c_uint32(5)
    begin = time.monotonic()
    futex.wait(ctypes.addressof(word), 5, 0.05)
    assert time.monotonic() - begin >= 0.05


def test_sleepers_of_other_processes_are_woken() -> None:
    shared = mmap.mmap(-1, 4096)
    word = ctypes.c_uint32.from_buffer(shared)
    address = ctypes.addressof(word)
    children = [forked(lambda: futex.wait(address, 0, 60)) for _ in range(3)]
    woken = 0
    deadline = time.monotonic() + 30
    while woken < 3 and time.monotonic() < deadline:
        woken += futex.wake(address)
    assert woken == 3
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def test_an_unknown_processor_has_none(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert futex.is_available()
    futex.is_available.cache_clear()
    futex._call_number.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert not futex.is_available()


def test_a_system_that_refuses_the_call_has_none(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that no call has is refused like one that a sandbox does not permit."""
    monkeypatch.setitem(futex._CALL_NUMBERS, "x86_64", 100_000)
    monkeypatch.setitem(futex._CALL_NUMBERS, "aarch64", 100_000)
    assert not futex.is_available()
