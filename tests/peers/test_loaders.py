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
    TensorDataset,
    WeightedRandomSampler,
)

from nbaccel import notebook_launcher
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.train.arrival import arrive
from nbaccel.train.collectives import Collectives
from nbaccel.train.gradient import GradientState
from nbaccel.train.loading import prepare_data_loader

pytestmark = pytest.mark.timeout(300)


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
    place = arrive(cpu=True)
    found = []
    for kind, settings in cases:
        torch.manual_seed(7)
        state = GradientState()
        loader = prepare_data_loader(
            make(kind), place, state, DataLoaderConfiguration(**settings), Collectives(place)
        )
        length = None if "stream" in kind else len(loader)
        found.append((epochs(loader, state), length, loader.total_batch_size))
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
            length = None if "stream" in kind else len(loader)
            seen = epochs(loader, accelerator.gradient_state)
            found.append((seen, length, getattr(loader, "total_batch_size", None) if 0 else None))
            AcceleratorState._reset_state(False)
    finally:
        AcceleratorState._reset_state(True)
    return found


def both(cases: Any) -> tuple[list[Any], list[Any]]:
    return ours(cases), theirs(cases)


def test_two():
    results = notebook_launcher(both, (CASES,), 2)
    for rank, (a, b) in enumerate(results):
        for case, x, y in zip(CASES, a, b, strict=True):
            print(rank, case, "OK" if x[:2] == y[:2] else f"\n   ours   {x}\n   theirs {y}")


def test_one():
    results = notebook_launcher(both, (CASES,), 1)
    for rank, (a, b) in enumerate(results):
        for case, x, y in zip(CASES, a, b, strict=True):
            print(rank, case, "OK" if x[:2] == y[:2] else f"\n   ours   {x}\n   theirs {y}")
