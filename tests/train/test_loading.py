"""Preparing loaders and skipping batches: who reads what, what is refused, what is left alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from nbaccel import ConfigError, notebook_launcher
from nbaccel.abc.place import Place
from nbaccel.data_loader import skip_first_batches
from nbaccel.errors import MissingBackend
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import PreparedLoader
from tests.train.data import Numbers, Stream, here, lists, prepare

FIRST_OF_TWO = Place(world_size=2, local_world_size=2, device=torch.device("cpu"))


def test_a_loader_that_reads_in_its_own_way_is_for_one_process():
    class Doubling(DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    own = Doubling(Numbers(4), batch_size=2)
    with pytest.raises(ConfigError, match=r"Doubling reads its dataset in its own way.*2 proc"):
        prepare(own, place=FIRST_OF_TWO)
    assert lists(prepare(own)) == [[0, 2], [4, 6]]


@pytest.mark.parametrize(
    ("loader", "settings", "message"),
    [
        (DataLoader(Numbers(), batch_size=3), {"split_batches": True}, r"batch_size=3.*=4"),
        (DataLoader(Stream(), batch_size=3), {"split_batches": True}, r"batch_size=3.*=4"),
        (DataLoader(Numbers(), batch_size=None), {"split_batches": True}, r"batch_size=None"),
        (
            DataLoader(Numbers(), batch_size=2),
            {"dispatch_batches": True, "put_on_device": False},
            r"dispatch_batches=True.*device placement",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(loader, settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare(loader, place=FIRST_OF_TWO, **settings)


def test_a_stateful_loader_needs_torchdata(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingBackend, match=r"use_stateful_dataloader.*torchdata"):
        prepare(DataLoader(Numbers(), batch_size=3), use_stateful_dataloader=True)


class Pieces(IterableDataset):
    """A dataset that can be cut into shards, as those of Hugging Face."""

    def __init__(self, numbers, num_shards=4):
        self.numbers = list(numbers)
        self.num_shards = num_shards

    def shard(self, num_shards, index):
        return Pieces(self.numbers[index::num_shards], self.num_shards // num_shards)

    def __iter__(self):
        return iter(map(torch.tensor, self.numbers))


class Pairs(Numbers):
    """A dataset that is asked for whole batches."""

    def __getitem__(self, index):
        return torch.tensor(index) if isinstance(index, list) else torch.tensor([index, -index])


def shared_in_many_ways():
    every = [
        here(DataLoader(Pieces(range(8)), batch_size=2), dispatch_batches=False),
        here(DataLoader(Pieces(range(8), 1), batch_size=2), dispatch_batches=False),
        here(DataLoader(Pairs(4), batch_size=None)),
        here(
            DataLoader(
                Pairs(7),
                sampler=BatchSampler(SequentialSampler(range(7)), 2, False),
                batch_size=None,
            )
        ),
        here(
            DataLoader(
                Numbers(6), batch_size=2, sampler=DistributedSampler(Numbers(6), shuffle=False)
            )
        ),
    ]
    return [lists(loader) for loader in every]


def test_every_kind_of_loader_is_shared_out():
    first, second = notebook_launcher(shared_in_many_ways, (), 2)
    natively, streamed, whole, batched, distributed = zip(first, second, strict=True)
    assert natively == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])
    assert streamed == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert whole == ([[0, 0], [2, -2]], [[1, -1], [3, -3]])
    assert batched == ([[0, 1], [4, 5]], [[2, 3], [6, 0]])
    # Accelerate shares these shares out again, and half of the samples are never seen.
    assert distributed == ([[0, 2], [4]], [[1, 3], [5]])


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("dataset", [Numbers, Stream])
@pytest.mark.parametrize("skip", [0, 1, 3, 9])
def test_the_first_batches_are_left_out(prepared, dataset, skip):
    loader = DataLoader(dataset(), batch_size=3)
    loader = prepare(loader) if prepared else loader
    every = lists(loader)
    skipping = skip_first_batches(loader, skip)
    assert lists(skipping) == every[skip:]
    assert isinstance(skipping, PreparedLoader if prepared else DataLoader)
    if dataset is Numbers:
        assert len(skipping) == max(0, 4 - skip)
    assert lists(loader) == every


def test_samples_that_are_left_out_are_not_read_and_count_as_seen():
    data = Numbers()
    lists(skip_first_batches(prepare(DataLoader(data, batch_size=3)), 2))
    assert data.read == [6, 7, 8, 9]
    state = GradientState()
    loader = prepare(DataLoader(Numbers(), batch_size=3), state)
    seen = [(loader.batches_seen, state.end_of_dataloader) for _ in skip_first_batches(loader, 2)]
    assert seen == [(3, False), (4, True)]
    assert (loader.iteration, loader.batches_seen) == (1, 0)


@pytest.mark.parametrize("number", [None, -1])
def test_a_plain_loader_must_be_told_how_many(number):
    with pytest.raises(ConfigError, match=rf"DataLoader, num_batches={number}.*Give a number"):
        skip_first_batches(DataLoader(Numbers(), batch_size=3), number)


def skipped_on_two():
    found = []
    for settings in ({}, {"split_batches": True}, {"dispatch_batches": True}):
        for dataset in (Numbers(10), Stream(10)):
            loader = here(DataLoader(dataset, batch_size=2), **settings)
            every = lists(loader)
            skipping = skip_first_batches(loader, 2)
            rest = [(batch.tolist(), skipping.remainder) for batch in skipping]
            found.append((rest[0][0] == every[2], len(rest) == len(every) - 2, rest[-1][1]))
    return found


def test_the_remainder_stays_known_after_skipping():
    """Accelerate forgets it, and metrics count copies twice."""
    expected = [(True, True, remainder) for remainder in (2, 2, 0, 2, 2, 2)]
    assert notebook_launcher(skipped_on_two, (), 2) == [expected] * 2
