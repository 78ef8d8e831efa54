"""What the tests run in an allocation, in the place of a notebook: `slurm_notebook.py CELL`."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from nbaccel import notebook_launcher


def tell(**facts):
    print("TOLD " + json.dumps(facts), flush=True)


def train(model):
    dist.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(torch.full((4, 8), 1.0 + dist.get_rank())).sum().backward()
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    return dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["SLURMD_NODENAME"]


def cell_train():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    before = model.weight.clone()
    results = notebook_launcher(train, (model,), 4, engine="slurm")
    tell(results=list(results), trained=not torch.equal(before, model.weight))


def hang():
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"rank {dist.get_rank()} hangs", flush=True)
    time.sleep(600)


def cell_hang():
    try:
        notebook_launcher(hang, (), 4, engine="slurm")
    except BaseException as error:
        tell(kind=type(error).__name__, text=str(error), at=time.time())


def cell_refused():
    try:
        notebook_launcher(hang, (), 4, engine="slurm")
    except Exception as error:
        tell(kind=type(error).__name__, text=str(error))


if __name__ == "__main__":
    globals()[f"cell_{sys.argv[1]}"](*sys.argv[2:])
