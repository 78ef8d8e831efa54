"""A model's way to a worker and home again, within one process: the worker's side is a private map.

notebook's module ─ share ─► arena ─ payload ─► worker's module ─ write ─► staging ─► home
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.transfer import arena, memfd, pickling, weight_sync as receiver_module
from nbaccel.transfer.arena import named_tensors
from nbaccel.transfer.memfd import PAGE_BYTES
from nbaccel.transfer.object_walk import find_modules
from nbaccel.transfer.received_modules import LocalArena, ReceivedModules
from nbaccel.transfer.weight_sync import WeightReceiver, WeightReport
from tests.process import descriptors


class Worker:
    """One rank's copy of the arguments, and its way home."""

    def __init__(self, trip: Trip, rank: int) -> None:
        self.received = ReceivedModules(rank=rank, staging_files=trip.weight_receiver.staging)
        for key, found in trip.arenas.items():
            self.received.open_arena(key, found.nbytes, found.fd)
        self.mappings = self.received.mappings
        self.args, modules = pickling.unpack(trip.payload, trip.fd, self.mappings)
        for shared in modules:
            self.received.add(shared.path, shared)


class Trip:
    """One launch of a function of these arguments, without processes."""

    def __init__(self, *args: Any) -> None:
        self.sharing = arena.share_modules(find_modules(args))
        sender = pickling.Sender(self.sharing.stand_ins)
        for found in self.sharing.arenas.values():
            sender.key(found)
        self.payload, self.fd = pickling.pack((args, self.sharing.modules), sender)
        self.arenas = dict(sender.arenas)
        self.weight_receiver = WeightReceiver(self.sharing, self.arenas)

    def worker(self, rank: int = 0) -> Worker:
        return Worker(self, rank)

    def come_home(self, *workers: Worker) -> WeightReport:
        """All ranks have returned; the first worker's report is given back."""
        reports = [worker.received.write_all() for worker in workers]
        self.weight_receiver.apply(reports)
        return reports[0]

    def close(self) -> None:
        self.weight_receiver.close(close_all)
        with contextlib.suppress(OSError):
            os.close(self.fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


Launch = Callable[..., Trip]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts a trip, and closes it in the end; no descriptor may be left."""
    trips: list[Trip] = []

    def start(*args: Any) -> Trip:
        trips.append(Trip(*args))
        return trips[-1]

    yield start
    while trips:
        trips.pop().close()


class Net(nn.Module):
    """A frozen base, a small head, tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256)
        self.head = nn.Linear(256, 4)
        self.tied = self.head.weight
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.base(x)))


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module)}


def assert_equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in named_tensors(module):
        assert torch.equal(tensor, expected[name]), name


def step(module: nn.Module, optimizer: type[torch.optim.Optimizer], **settings: Any) -> None:
    params = [p for p in module.parameters() if p.requires_grad]
    stepper = optimizer(params, lr=0.1, **settings)
    module(torch.randn(8, 256)).pow(2).sum().backward()
    stepper.step()


def disk_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_model_trained_whole_is_trained_in_the_staging_file(launch, optimizer):
    module = Net()
    before, trip = values(module), launch(module)
    worker = trip.worker()
    step(worker.args[0], optimizer)
    (mapping,) = worker.mappings.values()
    assert mapping.written() in ([], [(0, mapping.nbytes)]), "no private page is left"
    assert_equal(module, before)
    report = trip.come_home(worker)
    own_bytes = {key: memfd.merge_ranges(ranges) for key, ranges in report.own_bytes.items()}
    assert own_bytes == {key: [(0, found.nbytes)] for key, found in worker.mappings.items()}
    assert_equal(module, values(worker.args[0]))
    assert not torch.equal(module.head.weight, before["head.weight"])
    assert module.tied is module.head.weight
    assert int(module.norm.num_batches_tracked) == 1


def test_a_frozen_base_is_not_copied(launch):
    module = Net()
    for p in module.base.parameters():
        p.requires_grad_(requires_grad=False)
    trip = launch(module)
    worker = trip.worker()
    step(worker.args[0], torch.optim.SGD)
    (staging,) = trip.weight_receiver.staging.values()
    trip.come_home(worker)
    assert disk_bytes(staging) < 8 * PAGE_BYTES, "256 KiB of frozen weights stay where they are"
    assert_equal(module, values(worker.args[0]))


def test_pages_changed_by_hand_are_copied_once_and_equal_ones_not(launch):
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))  # 4 pages each
    trip = launch(module)
    worker = trip.worker()
    (staging,) = trip.weight_receiver.staging.values()
    with torch.no_grad():
        for number, p in enumerate(worker.args[0].parameters()):
            p.add_(1 if number in (1, 2) else 0)
    (mapping,) = worker.mappings.values()
    assert memfd.total_bytes(mapping.written()) == 24 * PAGE_BYTES, "all were written"
    report = trip.come_home(worker)
    through_file = sum(map(memfd.total_bytes, report.own_bytes.values()))
    assert through_file == disk_bytes(staging) == 8 * PAGE_BYTES
    assert_equal(module, values(worker.args[0]))


def replaced_parameter(module: nn.Module) -> None:
    module.head.weight = nn.Parameter(torch.full((4, 256), 2.5))
    module.tied = module.head.weight
    module.norm.running_mean = torch.full((256,), 3.0)


def other_memory_format(module: nn.Module) -> None:
    module.base.weight.data = module.base.weight.data.t().contiguous().t() + 1


def loaded_with_assign(module: nn.Module) -> None:
    state = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    module.tied = module.head.weight


@pytest.mark.parametrize(
    "change", [nn.Module.double, replaced_parameter, other_memory_format, loaded_with_assign]
)
@pytest.mark.parametrize("whole", [True, False], ids=["in place", "by pages"])
def test_tensors_that_left_the_arena_come_home(launch, change, whole):
    module = Net()
    before, dtypes = values(module), {name: t.dtype for name, t in named_tensors(module)}
    trip = launch(module)
    worker, other = trip.worker(), trip.worker(1)
    if whole:
        step(worker.args[0], torch.optim.SGD)
    change(worker.args[0])
    with torch.no_grad():
        worker.args[0].head.bias.add_(1)
        other.args[0].base.weight.zero_()  # stays with rank 1
    assert_equal(module, before)
    trip.come_home(worker, other)
    trained = dict(named_tensors(worker.args[0]))
    for name, tensor in named_tensors(module):
        assert tensor.dtype == dtypes[name], name
        assert torch.equal(tensor, trained[name].to(dtypes[name])), name
    assert module.tied is module.head.weight


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(64.0)
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(3, 4))
        self.strided = nn.Parameter(torch.randn(10)[::2])
        self.low, self.high = nn.Parameter(base[8:16]), nn.Parameter(base[16:40].view(4, 6))
        self.bf16 = nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))


def test_expanded_strided_and_overlapping_tensors_come_home_from_elsewhere(launch):
    module = Odd()
    trip = launch(module)
    worker = trip.worker()
    copy = worker.args[0]
    for name, tensor in list(named_tensors(copy)):
        new = tensor.detach().clone() + 1
        new = new[:1].expand(3, 4) if name == "expanded" else new
        setattr(copy, name, nn.Parameter(new) if name != "count" else new)
    expected = values(copy)
    trip.come_home(worker)
    assert_equal(module, expected)
    assert module.expanded.stride() == (0, 1)
    assert module.low.untyped_storage().data_ptr() == module.high.untyped_storage().data_ptr()
    # One of two views that moved does not erase the other.
    trip = launch(module)
    worker = trip.worker()
    copy = worker.args[0]
    copy.low = nn.Parameter(torch.full((8,), -1.0))
    with torch.no_grad():
        copy.high.add_(100)
    expected = values(copy)
    trip.come_home(worker)
    assert_equal(module, expected)


def other_shape(module: nn.Module) -> None:
    module.head = nn.Linear(256, 5)
    module.tied = module.head.weight


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_shape, r"head.bias has shape \(5,\) instead of \(4,\)"),
        (lambda module: module.add_module("extra", nn.Linear(2, 2)), "extra.bias is new"),
        (lambda module: delattr(module, "norm"), r"norm.\w+ is gone.* and 2 more"),
    ],
)
def test_a_module_with_another_structure_comes_as_a_state_dict(launch, change, says):
    module, other = Net(), nn.Linear(300, 300)
    before, trip = values(module), launch(module, {"teacher": other})
    worker = trip.worker()
    copy = worker.args[0]
    with torch.no_grad():
        worker.args[1]["teacher"].weight.fill_(4)
    step(copy, torch.optim.SGD)
    change(copy)
    report = trip.come_home(worker)
    assert report.stranded.keys() == {"args[0]"}
    assert re.search(says, report.stranded["args[0]"])
    assert_equal(module, before)
    assert bool((other.weight == 4).all()), "the other model is at home"
    state = report.state_dicts["args[0]"]
    assert state.keys() == copy.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in copy.state_dict().items())


def test_an_interrupt_in_the_midst_of_closing_costs_no_staging_file(launch):
    weight_receiver = launch(Net()).weight_receiver
    (fd,) = weight_receiver.staging.values()

    def interrupted_before_it_closes(fds: Sequence[int]) -> None:
        signal.raise_signal(signal.SIGINT)
        memfd.close_all(fds)

    with pytest.raises(KeyboardInterrupt):
        weight_receiver.close(interrupted_before_it_closes)
    assert fd not in descriptors()


def test_where_the_second_file_cannot_be_made_the_first_is_closed(launch, monkeypatch):
    made, real = [], memfd.create_file

    def create(name: str, nbytes: int) -> int:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(real(name, nbytes))
        return made[0]

    trip = launch(Net())
    (arena,) = trip.arenas.values()
    monkeypatch.setattr(receiver_module.memfd, "create_file", create)
    with pytest.raises(OSError, match="too many"):
        receiver_module.WeightReceiver(trip.sharing, {"a": arena, "b": arena})
    assert made[0] not in descriptors()


def test_an_interrupt_never_leaves_a_rank_between_its_own_file_and_the_arenas(monkeypatch):
    parameter = nn.Parameter(torch.ones(2 * PAGE_BYTES))
    nbytes = parameter.nbytes
    file = memfd.create_file("arena", nbytes)
    with memfd.closing_files(file):
        rank_0 = LocalArena(file, memfd.Mapping(file, nbytes, is_private=True))
        place = rank_0.mapping
        parameter.data = torch.from_numpy(place.bytes()).view(torch.float32)
        stepper = torch.optim.SGD([parameter])

        def interrupted(*args: Any, **kwargs: Any) -> None:
            memfd.Mapping.replace(place, *args, **kwargs)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(place, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank_0.train_in_file(None, stepper)
        parameter.data.fill_(2.0)
        assert rank_0.own_file is not None
        trained = bytearray(os.pread(rank_0.own_file, nbytes, 0))
        assert torch.frombuffer(trained, dtype=torch.float32).unique().tolist() == [2.0]
        with pytest.raises(KeyboardInterrupt):
            rank_0.leave_file()
        assert rank_0.own_file is None, "its number may be another file's by now"
        assert parameter.data.unique().tolist() == [2.0]
        assert memfd.merge_ranges(rank_0.written()) == [(0, nbytes)]
