"""A small training whose every part is saved, as tests of checkpoints use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nbaccel.abc.place import Place
from nbaccel.strategies.single import SingleStrategy
from nbaccel.train.checkpoint import CheckpointParts
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process

ALONE = Place(device=torch.device("cpu"))


class Tied(nn.Module):
    """Two layers, one weight; a buffer that counts."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.second(self.first(x).relu())


@dataclass
class Counter:
    """A registered object; its state holds what only a full pickle can."""

    value: int = 0
    seen: set[complex] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self.seen, "kind": Counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.seen = state["value"], state["seen"]


class Position:
    """A loader, as far as a checkpoint can see."""

    def __init__(self, stateful: bool = False) -> None:
        self.use_stateful_dataloader = stateful
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Training:
    """All that a checkpoint keeps, in one process or as one of several."""

    def __init__(self, place: Place = ALONE, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.place = place
        self.collectives = Collectives(place)
        self.model = Tied(width)
        # A learning rate out of a sweep over np.logspace is one of numpy's numbers.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=np.float64(0.1))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)
        self.loaders = [Position(), object(), Position(stateful=True)]
        self.counter = Counter()
        self.parts = CheckpointParts(
            strategy=SingleStrategy(place),
            models=[self.model],
            optimizers=[self.optimizer],
            schedulers=[self.scheduler],
            loaders=self.loaders,
            custom=[self.counter],
        )

    def step(self, times: int = 1) -> list[float]:
        """Train on random numbers; returns the losses."""
        losses = []
        for _ in range(times):
            loss = self.model(torch.randn(3, self.model.first.in_features)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.counter.value += 1
            self.counter.seen.add(complex(self.counter.value))
            for loader in self._positions():
                loader.at += 1 + self.place.rank
            losses.append(loss.item())
        return losses

    def _positions(self) -> list[Position]:
        return [loader for loader in self.loaders if isinstance(loader, Position)]

    def state(self) -> tuple[Any, ...]:
        """Everything that must come back, comparable."""
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        moments = [
            {key: value.tolist() for key, value in entry.items()}
            for entry in self.optimizer.state_dict()["state"].values()
        ]
        ats = [loader.at for loader in self._positions()]
        count = (self.counter.value, sorted(map(abs, self.counter.seen)))
        return weights, moments, self.scheduler.last_epoch, count, ats


def arrived(seed: int = 0) -> Training:
    """The training of one process of a launch."""
    return Training(init_process(cpu=True), seed)
