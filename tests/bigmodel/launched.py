"""What the launches of these tests run in their workers."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch
from torch import nn
from typing_extensions import Self


def tower(layers: int, width: int, device: str = "meta") -> nn.Sequential:
    """Square layers, and a norm with buffers."""
    parts = [nn.Linear(width, width, bias=False, device=device) for _ in range(layers)]
    return nn.Sequential(*parts, nn.BatchNorm1d(width, device=device))


def sums(model: nn.Module) -> list[float]:
    """A figure for each tensor, equal for equal values."""
    return [float(t.detach().double().sum()) for t in model.state_dict().values()]


def add_one(model: nn.Module) -> list[float]:
    """What a worker sees of a model, to which it then adds 1."""
    seen = sums(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return seen


def only_look(model: nn.Module) -> list[float]:
    return sums(model)


def figures() -> dict[str, int]:
    """Bytes of memory of this process, by kind: Anon, File, Shmem."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line[3:].partition(":")[0]: int(line.split()[1]) * 1024
        for line in lines
        if line.startswith("Rss")
    }


class Peak:
    """The largest sum of some kinds of memory while it watches, beyond what there was before."""

    def __init__(self, *kinds: str) -> None:
        self._kinds, self.bytes, self._done = kinds, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def now(self) -> int:
        now = figures()
        return sum(now[kind] for kind in self._kinds)

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, self.now() - self.before)

    def __enter__(self) -> Self:
        gc.collect()
        self.before = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = max(self.bytes, self.now() - self.before)
        self._done.set()
        self._thread.join()
