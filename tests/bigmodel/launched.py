"""What the launches of these tests run in their workers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


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


def smaps() -> dict[str, int]:
    """Bytes of memory of this process, by the kernel's names; Pss counts shared pages once."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, size = line.partition(":")
        found[name] = int(size.split()[0]) * 1024
    return found
