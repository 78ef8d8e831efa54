"""Small models, small data, and a short way to run a loop on several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, notebook_launcher


def together(body: Callable[..., Any], n: int = 2, **arguments: Any) -> list[Any]:
    """What ``body(accelerator)`` returns on each of `n` processes."""

    def run() -> Any:
        return body(Accelerator(cpu=True, **arguments))

    return list(notebook_launcher(run, num_processes=n))


def told(call: Callable[[], Any]) -> str:
    """Class and text of the exception that a call raises."""
    try:
        call()
    except Exception as error:  # which one is what is asked
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def numbers(n: int = 10, batch_size: int = 3, **options: Any) -> DataLoader[Any]:
    """A loader of 0, 1, 2, …, as rows of one float."""
    return DataLoader(
        TensorDataset(torch.arange(n, dtype=torch.float32)[:, None]),
        batch_size=batch_size,
        **options,
    )


def rows(batch: Any) -> list[int]:
    """The numbers in a batch of `numbers`."""
    return [int(x) for x in batch[0].flatten()]


def line(weight: float = 1.0) -> nn.Linear:
    """``y = weight * x``."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def weight(model: Any) -> float:
    return float(next(model.parameters()).detach())
