"""Shares of an epoch: the tables that users know, sizes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from nbaccel import ConfigError
from nbaccel.train.sampling import BatchSamplerShard, IterableDatasetShard
from tests.train.data import Stream


def test_what_needs_a_size_or_a_split_that_divides():
    """Accelerate drops the round it ends."""

    class Buckets:
        batch_size = 2
        drop_last = False

        def __iter__(self):
            return iter([[0, 1], [2], [3, 4], [5, 6]])

    pair = [BatchSamplerShard(Buckets(), 2, rank) for rank in range(2)]
    assert [list(shard) for shard in pair] == [[[0, 1], [3, 4]], [[2], [5, 6]]]
    pair = [BatchSamplerShard(SequentialSampler(range(5)), 2, rank) for rank in range(2)]
    assert [list(shard) for shard in pair] == [[0, 2, 4], [1, 3, 0]]
    assert [shard.remainder for shard in pair] == [-1, -1]
    with pytest.raises(ConfigError, match=r"SequentialSampler.*batch_size=None"):
        BatchSamplerShard(SequentialSampler(range(4)), 2, 0, True)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_batches_that_do_not_divide_are_refused(size):
    with pytest.raises(
        ConfigError, match=rf"batch_size={size}.*2 processes.*batch_size={size + 1}"
    ):
        BatchSamplerShard(BatchSampler(SequentialSampler(range(10)), size, False), 2, 0, True)
    with pytest.raises(ConfigError, match=rf"batch_size={size}.*Stream|Stream.*batch_size={size}"):
        IterableDatasetShard(Stream(), size, False, 2, 0, True)


def test_a_stream_counts_what_was_real_in_its_last_round():
    for drop, expected in [(False, [9, 0, 1]), (True, [3, 4, 5])]:
        shard = IterableDatasetShard(Stream(), 3, drop, 2, 1)
        assert [int(x) for x in shard][-3:] == expected
        assert shard.remainder == 4


def test_a_streams_generator_is_seeded_with_the_epoch():
    class Random(Stream):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(10, generator=self.generator))

    orders = []
    for epoch in (0, 0, 1):
        shard = IterableDatasetShard(Random(), 5)
        shard.set_epoch(epoch)
        orders.append([int(x) for x in shard])
    assert orders[0] == orders[1] != orders[2]
