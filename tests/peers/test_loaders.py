"""Loaders give every process what Accelerate gives it, in the same order, drawing as much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from nbaccel import notebook_launcher
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.data_loader import share_data_loader
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from nbaccel.train.gradient import GradientState

pytestmark = pytest.mark.slow


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(10))


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.as_tensor(index)


def make(kind: str) -> DataLoader[Any]:
    data = Numbers()
    draws = torch.Generator().manual_seed(5)
    return {
        "plain": lambda: DataLoader(data, batch_size=3),
        "four": lambda: DataLoader(data, batch_size=4),
        "shuffled": lambda: DataLoader(data, batch_size=3, shuffle=True),
        "shuffled four": lambda: DataLoader(data, batch_size=4, shuffle=True),
        "generator": lambda: DataLoader(data, batch_size=3, shuffle=True, generator=draws),
        "drop": lambda: DataLoader(data, batch_size=3, shuffle=True, drop_last=True),
        "weighted": lambda: DataLoader(data, 3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        "batches": lambda: DataLoader(
            data, sampler=BatchSampler(RandomSampler(data), 3, False), batch_size=None
        ),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "stream four": lambda: DataLoader(Stream(), batch_size=4),
        "stream drop": lambda: DataLoader(Stream(), batch_size=3, drop_last=True),
    }[kind]()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("shuffled", {}),
    ("generator", {}),
    ("drop", {}),
    ("weighted", {}),
    ("batches", {}),
    ("shuffled", {"even_batches": False}),
    ("shuffled four", {"split_batches": True}),
    ("shuffled four", {"split_batches": True, "even_batches": False}),
    ("shuffled", {"use_seedable_sampler": True}),
    ("shuffled", {"use_seedable_sampler": True, "data_seed": 42}),
    ("generator", {"use_seedable_sampler": True}),
    ("shuffled", {"dispatch_batches": True}),
    ("generator", {"dispatch_batches": True}),
    ("shuffled", {"dispatch_batches": True, "use_seedable_sampler": True}),
    ("drop", {"dispatch_batches": True}),
    ("shuffled four", {"dispatch_batches": True, "split_batches": True}),
    ("stream", {}),
    ("stream drop", {}),
    ("stream", {"dispatch_batches": False}),
    ("stream drop", {"dispatch_batches": False}),
    ("stream four", {"split_batches": True}),
    ("stream four", {"split_batches": True, "dispatch_batches": False}),
    ("plain", {"use_stateful_dataloader": True}),
    ("shuffled", {"use_stateful_dataloader": True}),
]


def epochs(loader: Any, state: Any) -> list[Any]:
    """Two epochs: batches, with the state in the loop's body; and what can be drawn after."""
    seen: list[Any] = []
    for _ in range(2):
        for batch in loader:
            end = state.end_of_dataloader
            seen.append((batch.tolist(), end, state.remainder if end else None))
        seen.append(torch.randint(10**9, ()).item())
    return seen


def ours(cases: Any) -> list[Any]:
    place = init_process(cpu=True)
    found = []
    for kind, settings in cases:
        torch.manual_seed(7)
        state = GradientState()
        configuration = DataLoaderConfiguration(**settings)
        loader = share_data_loader(make(kind), place, state, configuration, Collectives(place))
        found.append((None if "stream" in kind else len(loader), epochs(loader, state)))
    return found


def theirs(cases: Any) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration as Configuration

    found = []
    try:
        for kind, settings in cases:
            accelerator = Accelerator(cpu=True, dataloader_config=Configuration(**settings))
            torch.manual_seed(7)
            loader = accelerator.prepare(make(kind))
            seen = epochs(loader, accelerator.gradient_state)
            found.append((None if "stream" in kind else len(loader), seen))
            AcceleratorState._reset_state(False)
    finally:
        AcceleratorState._reset_state(True)
    return found


def both(cases: Any) -> tuple[list[Any], list[Any]]:
    return ours(cases), theirs(cases)


def without_remainder(seen: list[Any]) -> list[Any]:
    return [entry[:2] if isinstance(entry, tuple) else entry for entry in seen]


def test_two_processes_see_what_accelerates_see() -> None:
    for rank, (mine, peers) in enumerate(notebook_launcher(both, (CASES,), 2)):
        for (kind, settings), ours_, theirs_ in zip(CASES, mine, peers, strict=True):
            # A stream that each process reads: Accelerate does not know its remainder, so that
            # metrics count copies twice.
            unknown = kind.startswith("stream") and settings.get("dispatch_batches") is False
            view = without_remainder if unknown else list
            assert ours_[0] == theirs_[0], (rank, kind, settings)
            assert view(ours_[1]) == view(theirs_[1]), (rank, kind, settings)


# torchdata 0.11 calls a function that torch 2.13 deprecates, for every loader it makes.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_one_process_sees_what_accelerates_sees() -> None:
    cases = [case for case in CASES if case[0] != "batches"]  # Accelerate raises TypeError
    mine, peers = both(cases)
    for case, (length, seen), (peer_length, expected) in zip(cases, mine, peers, strict=True):
        assert length == peer_length, case
        # With one process there are no copies, so the remainder says nothing.
        assert without_remainder(seen) == without_remainder(expected), case
