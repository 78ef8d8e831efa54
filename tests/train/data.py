"""Small data, and short ways to prepare loaders of it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbaccel.abc.place import Place
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.data_loader import share_data_loader
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import PreparedLoader

ALONE = Place(device=torch.device("cpu"))


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, …; `draws` adds a random fraction, as an augmentation would."""

    def __init__(self, length: int = 10, *, draws: bool = False) -> None:
        self.length = length
        self.draws = draws
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.read.append(index)
        number = torch.as_tensor(index, dtype=torch.float32)
        return number + torch.rand(()) if self.draws else number


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


def prepare(
    loader: DataLoader[Any],
    state: GradientState | None = None,
    place: Place = ALONE,
    *,
    put_on_device: bool = True,
    slice_fn: Any = None,
    **settings: Any,
) -> PreparedLoader:
    return share_data_loader(
        loader,
        place,
        GradientState() if state is None else state,
        DataLoaderConfiguration(**settings),
        Collectives(place),
        put_on_device=put_on_device,
        slice_fn=slice_fn,
    )


def here(loader: DataLoader[Any], **settings: Any) -> PreparedLoader:
    """Prepared in a worker, for the place it is at."""
    return prepare(loader, place=init_process(cpu=True), **settings)


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]
