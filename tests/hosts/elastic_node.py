"""One node of an elastic run, as its user starts it: `elastic_node.py CELL ENDPOINT ...`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nbaccel import notebook_launcher


def tell(**facts):
    print("TOLD " + json.dumps(facts), flush=True)


def train(model, folder):
    """Goes on from the last step of a checkpoint; slow enough to be interrupted."""
    dist.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    checkpoint = Path(folder) / "checkpoint.pt"
    first_step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        first_step = state["step"]
        model.load_state_dict(state["model"])
    for step in range(first_step, 10):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        parallel(torch.randn(16, 8)).pow(2).mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"step": step + 1, "model": model.state_dict()}, folder + "/new")
            Path(folder, "new").replace(checkpoint)
        print(f"step {step} of rank {dist.get_rank()}", flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0")))
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), first_step, socket.gethostname()


def cell_train(endpoint, folder, **settings):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    results = notebook_launcher(
        train,
        (model, folder),
        2,
        num_nodes=2,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=3,
        **settings,
    )
    tell(results=list(results), weights=model.weight.flatten().tolist())


def cell_refused(endpoint, folder):
    started = time.monotonic()
    try:
        cell_train(endpoint, folder, rdzv_conf={"join_timeout": 4})
    except Exception as error:
        tell(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - started)


if __name__ == "__main__":
    globals()[f"cell_{sys.argv[1]}"](*sys.argv[2:])
