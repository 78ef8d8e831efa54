"""Loaders, optimizers and schedulers that Accelerate's users make by hand, or ask the class of."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import nbaccel
from nbaccel import data_loader
from nbaccel.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from nbaccel.errors import ConfigError
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.utils import DataLoaderConfiguration, ProfileKwargs
from tests.isolation import isolated

accelerate = pytest.importorskip("accelerate")
# torchdata's loader says it when it is made.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def theirs() -> Any:
    from accelerate.state import AcceleratorState, GradientState

    accelerate.Accelerator(cpu=True)
    yield importlib.import_module("accelerate.data_loader")
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "skip_batches": 1},
        {"batch_size": 4, "drop_last": True, "_drop_last": True},
        {"batch_size": 4, "use_stateful_dataloader": True},
    ],
)
@pytest.mark.parametrize("name", ["DataLoaderShard", "DataLoaderDispatcher"])
def test_a_loader_made_by_hand_reads_as_accelerates(theirs, name, arguments):
    mine = getattr(data_loader, name)(torch.arange(10), **arguments)
    other = getattr(theirs, name)(torch.arange(10), **arguments)
    batches = [batch.tolist() for batch in mine]
    assert batches == [batch.tolist() for batch in other]
    assert mine.total_dataset_length == 10
    assert mine.total_batch_size == 4
    if name == "DataLoaderShard":  # their dispatcher knows it of some datasets only
        assert other.total_batch_size == 4
    assert isinstance(mine, getattr(data_loader, name))


def test_loaders_made_by_hand_know_their_last_batch_and_skip_in_every_epoch(theirs):
    loader = DataLoaderShard(torch.arange(5), batch_size=2)
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    mine, other = (
        module.SkipDataLoader(range(16), batch_size=4, skip_batches=2)
        for module in (data_loader, theirs)
    )
    for _ in range(2):
        assert [batch.tolist() for batch in mine] == [batch.tolist() for batch in other]
    assert isinstance(mine, SkipDataLoader)


@pytest.mark.parametrize("dispatch_batches", [None, True, False])
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_what_prepare_returns_is_an_instance_of_their_classes(dispatch_batches, stateful, skips):
    from torchdata.stateful_dataloader import StatefulDataLoader

    accelerator = nbaccel.Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=dispatch_batches, use_stateful_dataloader=stateful
        ),
    )
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))
    if skips:
        loader = accelerator.skip_first_batches(loader, 1)
    assert isinstance(loader, DataLoaderDispatcher) is bool(dispatch_batches)
    assert isinstance(loader, DataLoaderShard) is not dispatch_batches
    assert isinstance(loader, StatefulDataLoader) is stateful
    expected = [[2, 3], [4, 5], [6, 7]] if skips else [[0, 1], [2, 3], [4, 5], [6, 7]]
    again = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in loader] == expected
    assert type(again) is type(loader)
    assert [batch.tolist() for batch in again] == expected
    assert not isinstance(DataLoader(range(2)), DataLoaderShard)


def test_optimizers_schedulers_and_profilers_made_by_hand_work_and_a_mesh_is_refused():
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = AcceleratedOptimizer(plain, True, None)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 0.5**step)
    scheduler = AcceleratedScheduler(schedule, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert not torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [0.25]
    assert isinstance(optimizer, AcceleratedOptimizer)
    waits_for_torchs = AcceleratedScheduler(schedule, [plain], False, True)
    waits_for_torchs.step()
    assert waits_for_torchs.get_last_lr() == [0.125]
    options = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}
    settings = ProfileKwargs(activities=["cpu"], record_shapes=True, schedule_option=options)
    with settings.build() as profiler:
        torch.ones(3, 3).matmul(torch.ones(3, 3))
        profiler.step()
    assert profiler.record_shapes
    assert isinstance(ProfileKwargs().build(), torch.profiler.profile)
    with pytest.raises(ConfigError, match=r"\['gpu'\].*Give some of cpu, cuda"):
        ProfileKwargs(activities=["gpu"]).build()
    for make in (DataLoaderShard, DataLoaderDispatcher, data_loader.prepare_data_loader):
        loader: Any = DataLoader(range(4))
        with pytest.raises(ConfigError, match=r"torch_device_mesh=tp.*Leave torch_device_mesh out"):
            make(loader, torch_device_mesh="tp")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@isolated
def test_the_state_of_a_stateful_loader_is_torchdatas_and_each_can_load_the_others(num_workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        return StatefulDataLoader(range(16), batch_size=2, num_workers=num_workers)

    def prepared() -> Any:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        return nbaccel.Accelerator(cpu=True, dataloader_config=config).prepare(make())

    def rest_of(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    bare, ours = make(), prepared()
    theirs = [bare.state_dict() for _ in bare][2]
    mine = [ours.state_dict() for _ in ours][2]
    assert theirs.keys() <= mine.keys()
    if not num_workers:  # each set of workers has a seed of its own
        assert {name: mine[name] for name in theirs} == theirs
    expected = [[i, i + 1] for i in range(6, 16, 2)]
    for loader, state in ((make(), theirs), (prepared(), mine), (prepared(), theirs)):
        loader.load_state_dict(state)
        assert rest_of(loader) == expected
    skipped = prepared()
    skipped.load_state_dict(theirs)
    assert skipped.batches_seen == 3
    with pytest.raises(ConfigError, match="not the state of a prepared loader"):
        prepared().load_state_dict({"another": 1})
