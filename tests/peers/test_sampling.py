"""Samplers choose what Accelerate's choose, for any length, batch size and number of processes."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import data_loader as peer
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from nbaccel.train import sampling

LENGTHS = st.integers(0, 40)
SIZES = st.integers(1, 6)
PROCESSES = st.integers(1, 5)


def batches(length: int, size: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(length)), size, drop_last)


def shares(module: Any, length: int, size: int, processes: int, drop: bool, *how: bool) -> Any:
    shards = [
        module.BatchSamplerShard(batches(length, size, drop), processes, rank, *how)
        for rank in range(processes)
    ]
    found = [[list(batch) for batch in shard] for shard in shards]
    return found, [len(shard) for shard in shards], [shard.total_length for shard in shards]


@settings(max_examples=300)
@given(LENGTHS, SIZES, PROCESSES, st.booleans(), st.booleans(), st.booleans())
def test_batches_are_shared_out_alike(length, size, processes, drop, split, even):
    size = size * processes if split else size
    case = (length, size, processes, drop, split, even)
    assert shares(sampling, *case) == shares(peer, *case)


class Odd:
    """A batch sampler without a size, whose batches are all different."""

    drop_last = False

    def __init__(self, lengths: list[int]) -> None:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.batches = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]

    def __iter__(self) -> Any:
        return iter([list(batch) for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


@given(st.lists(st.integers(1, 4), max_size=9), PROCESSES, st.booleans())
def test_batches_of_no_fixed_size_are_shared_out_alike(lengths, processes, even):
    ours, theirs = (
        [
            list(m.BatchSamplerShard(Odd(lengths), processes, r, False, even))
            for r in range(processes)
        ]
        for m in (sampling, peer)
    )
    assert ours == theirs


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


@settings(max_examples=200)
@given(LENGTHS, SIZES, PROCESSES, st.booleans(), st.booleans())
def test_streams_are_shared_out_alike(length, size, processes, drop, split):
    size = size * processes if split else size
    shards = [
        [
            m.IterableDatasetShard(Stream(length), size, drop, processes, r, split)
            for r in range(processes)
        ]
        for m in (sampling, peer)
    ]
    ours, theirs = ([list(shard) for shard in side] for side in shards)
    assert ours == theirs
    if not split:  # Accelerate's length in split mode is P times what it yields
        assert [len(s) for s in shards[0]] == [len(s) for s in shards[1]] == [len(o) for o in ours]
    else:
        assert [len(s) for s in shards[0]] == [len(o) for o in ours]


@given(LENGTHS, st.integers(0, 12))
def test_the_same_batches_are_skipped(length, skip):
    ours = sampling.SkipBatchSampler(batches(length, 3, False), skip)
    theirs = peer.SkipBatchSampler(batches(length, 3, False), skip)
    assert list(ours) == list(iter(theirs))
    assert len(ours) == len(list(iter(theirs)))  # Accelerate's own length may be negative


@given(st.integers(1, 30), st.integers(0, 2**31), st.integers(0, 5))
def test_seeded_orders_are_the_same(length, seed, epoch):
    orders = []
    for module in (sampling, peer):
        torch.manual_seed(seed)
        sampler = module.SeedableRandomSampler(range(length))
        sampler.set_epoch(epoch)
        orders.append([list(sampler), list(sampler), torch.randint(10**9, ()).item()])
    assert orders[0] == orders[1]
