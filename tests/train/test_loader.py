"""An iteration of a prepared loader: what it tells, what it leaves behind, what it costs."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler

from nbaccel import notebook_launcher
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.data_loader import share_data_loader
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from nbaccel.train.gradient import GradientState
from tests.train.data import Numbers, Stream, lists, prepare


@pytest.fixture
def state():
    return GradientState()


@pytest.fixture
def loader(state):
    return prepare(DataLoader(Numbers(), batch_size=3), state)


def test_it_reads_like_its_base_and_the_last_batch_is_known(loader, state):
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (3, False, 0)
    assert len(loader.dataset) == 10
    assert loader.collate_fn is loader.base.collate_fn
    assert isinstance(loader.sampler, SequentialSampler)
    assert loader.batch_sampler.batch_size == 3
    assert loader.multiprocessing_context is None
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (4, 3, 10)
    with pytest.raises(AttributeError, match="colour"):
        loader.colour  # noqa: B018 - the access is the test
    ends = []
    for batch in loader:
        ends.append((state.end_of_dataloader, loader.end_of_dataloader, state.remainder))
        assert state.active_dataloader is loader
        assert loader.batches_seen == len(ends)
        assert batch.shape[0] == (1 if state.end_of_dataloader else 3)
    assert ends == [(False, False, 1)] * 3 + [(True, True, 1)]
    assert not state.in_dataloader
    assert not loader.end_of_dataloader
    assert (loader.iteration, loader.batches_seen) == (1, 0)


def leave(loader, how):
    if how == "dropped":
        next(iter(loader))
        return
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            if how == "raised":
                raise ZeroDivisionError
            break


@pytest.mark.parametrize("how", ["broken", "raised", "dropped"])
def test_leaving_early_leaves_nothing_behind(loader, state, how):
    """After a `break`, Accelerate keeps the loader active: an outer loop never sees its end."""
    outer = prepare(DataLoader(Numbers(4), batch_size=2), state)
    ends = []
    for _ in outer:
        leave(loader, how)
        ends.append(state.end_of_dataloader)
        assert state.active_dataloader is outer
    assert ends == [False, True]
    assert not state.in_dataloader
    assert loader.iteration == 0  # an epoch that was not read to its end does not count
    assert lists(loader)[0] == [0, 1, 2]


def test_a_loader_may_run_inside_itself_and_the_epoch_is_told(loader, state):
    ends = []
    for _ in loader:
        assert len(lists(loader)) == 4
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, False, True]
    assert not state.in_dataloader
    loader = prepare(DataLoader(Shuffled(), batch_size=5), state)
    lists(loader)
    lists(loader)
    loader.set_epoch(7)
    lists(loader)
    assert loader.dataset.epochs == (0, 1, 7, 7)
    assert loader.iteration == 8


@pytest.mark.parametrize(
    ("loader", "remainder"),
    [
        (DataLoader(Numbers(9), batch_size=3), 0),
        (DataLoader(Numbers(10), batch_size=3, drop_last=True), -1),
        # Accelerate takes the dataset's length here, and metrics lose samples.
        (DataLoader(Numbers(10), batch_size=4, sampler=SubsetRandomSampler(range(7))), 3),
        (DataLoader(Stream(10), batch_size=4), -1),
    ],
)
def test_the_remainder_counts_samples_that_are_drawn(loader, remainder):
    prepared = prepare(loader)
    found = [prepared.remainder for _ in prepared]
    assert found[-1] == remainder


class Shuffled(Stream):
    epochs: tuple[int, ...] = ()

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)


def drawn_after_sharing():
    place = init_process(cpu=True)
    torch.manual_seed(place.rank)
    loader = share_data_loader(
        DataLoader(Numbers(), batch_size=5, shuffle=True),
        place,
        GradientState(),
        DataLoaderConfiguration(),
        Collectives(place),
        rng_types=["torch", "generator"],
    )
    before = torch.initial_seed()
    return before, lists(loader), torch.rand(3).tolist()


def test_other_generators_are_taken_from_process_0_too():
    first, second = notebook_launcher(drawn_after_sharing, (), 2)
    assert (first[0], second[0]) == (0, 1)
    assert sorted(first[1][0] + second[1][0]) == list(range(10))
    assert first[2] == second[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("sigchld")
def test_it_can_be_pickled(workers):
    loader = prepare(DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=workers))
    torch.manual_seed(1)
    expected = lists(loader)
    torch.manual_seed(1)
    copy = pickle.loads(pickle.dumps(loader))
    assert lists(copy) == expected
    assert (copy.iteration, loader.iteration) == (2, 1)
