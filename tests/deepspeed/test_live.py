"""Bytes of tensors, counted while they live."""

from __future__ import annotations

import torch

from nbaccel.memory.activations import LiveBytes

MIB = 2**20


def mebi(number):
    return torch.empty(number * MIB, dtype=torch.uint8)


def test_what_is_freed_is_counted_no_more_and_the_peak_stays():
    with LiveBytes() as live:
        first = mebi(3)
        second = mebi(2)
        del first
        third = mebi(1)
        assert (live.now, live.peak) == (3 * MIB, 5 * MIB)
    del second, third


def test_a_view_is_not_counted_again():
    with LiveBytes() as live:
        whole = mebi(4)
        part = whole[:MIB].view(-1, 2)
        assert live.now == 4 * MIB
        del whole
        assert live.now == 4 * MIB, "the view holds it"
        del part
        assert live.now == 0


def test_what_was_there_counts_when_it_is_adopted_and_once():
    there = mebi(2)
    with LiveBytes([there]) as live:
        view = there[1:]
        assert live.now == 0
        live.adopt([there, view])
        assert (live.now, live.peak) == (2 * MIB, 2 * MIB)
        del there, view
        assert live.now == 0


def test_one_that_is_made_where_another_was_freed_is_counted():
    """The allocator gives the same address again and again."""
    for _ in range(20):
        there = mebi(1)
        with LiveBytes([there]) as live:
            del there
            made = mebi(1)
            assert live.now == MIB
        del made


def test_a_storage_that_grows_counts_as_what_it_has_become():
    with LiveBytes() as live:
        grown = mebi(1)
        grown.resize_(3 * MIB)
        assert live.now == 3 * MIB
    del grown


def test_other_devices_are_left_out():
    with LiveBytes(device="cpu") as live:
        away = torch.empty(MIB, device="meta")
        here = mebi(1)
        assert live.now == MIB
    del away, here
