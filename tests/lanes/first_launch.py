"""What a user does first with an installed nbaccel: a model trained by two workers.

Run as a script with `-I`, so that nothing but installed packages can be imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import nbaccel


def train(model: nn.Module) -> int:
    accelerator = nbaccel.Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()
    return accelerator.process_index


def main() -> int:
    model = nn.Linear(8, 2)
    before = model.weight.detach().clone()
    ranks = list(nbaccel.notebook_launcher(train, (model,), num_processes=2))
    is_trained = not torch.equal(before, model.weight)
    where = Path(nbaccel.__file__)
    print(f"{ranks=} {is_trained=} {where}")
    is_installed = sys.prefix in str(where) and "site-packages" in where.parts
    return 0 if ranks == [0, 1] and is_trained and is_installed else 1


if __name__ == "__main__":
    sys.exit(main())
