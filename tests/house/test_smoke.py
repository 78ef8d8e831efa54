"""One launch, one cell, one prepared step: what `make quick` runs of all that starts processes."""

from __future__ import annotations

import torch
from torch import nn

from nbaccel import Accelerator, Pool, RunConfig, notebook_launcher

ON_CPU = RunConfig(device="cpu", num_processes=2)


def train(model: nn.Module) -> float:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.full((4, 8), float(accelerator.process_index))).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    return float(accelerator.reduce(loss.detach()))


def test_a_launch_trains_the_notebooks_model():
    model = nn.Linear(8, 2)
    before = model.weight.detach().clone()
    losses = notebook_launcher(train, (model,), config=ON_CPU)
    assert losses[0] == losses[1]
    assert not torch.equal(model.weight, before)


def test_a_cell_runs_on_each_rank():
    with Pool(config=ON_CPU) as pool:
        done = pool.run("import torch.distributed as dist\nrank = dist.get_rank()", out=["rank"])
    assert done.out["rank"] == [0, 1]


def test_a_prepared_step_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 2), nn.Linear(8, 2)
    theirs.load_state_dict(ours.state_dict())
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    accelerator.backward(model(batch).square().mean())
    theirs(batch).square().mean().backward()
    optimizer.step()
    reference.step()
    assert torch.equal(ours.weight, theirs.weight)
