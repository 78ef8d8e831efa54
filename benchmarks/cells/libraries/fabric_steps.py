"""Lightning Fabric: three steps of a small network, set up by a `Fabric` of one device."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment


def use(_rank: int) -> float:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
    model = torch.nn.Linear(16, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = torch.zeros(())
    for _ in range(3):
        loss = model(torch.ones(8, 16)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
