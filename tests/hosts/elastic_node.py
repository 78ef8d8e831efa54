"""One node of elastic runs, as its user starts it: `elastic_node.py FOLDER RUNS`.

RUNS is a list in JSON: each has a name, a mode, perhaps a file to wait for (`after`), and settings
of the launch. What became of each is told under its name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel import RunConfig, notebook_launcher

STEPS = 8


def tell(**facts: Any) -> None:
    print("TOLD " + json.dumps(facts), flush=True)


def train(model: nn.Module, folder: str, mode: str) -> dict[str, Any]:
    """Goes on from the last step of a checkpoint, where it is started anew."""
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    checkpoint = Path(folder) / f"{mode} checkpoint.pt"
    step = 0
    if restarts and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        ddp.module.load_state_dict(state["model"])
        step = state["step"]
    first_step = step
    while step < STEPS:
        torch.manual_seed(100 * step + rank)
        loss = ddp(torch.randn(4, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            torch.save({"model": ddp.module.state_dict(), "step": step}, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").rename(checkpoint)
        dist.barrier()
        if mode == "fails once" and rank == 3 and step == 3 and restarts == 0:
            raise ValueError("the first round fails")
        if mode == "fails" and rank == 3 and step == 3:
            raise ValueError("every round fails")
        if mode in ("slow", "stopped"):
            time.sleep(0.25)
    print(f"rank {rank} of {dist.get_world_size()} is through")
    return {
        "rank": rank,
        "world": dist.get_world_size(),
        "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
        "restarts": restarts,
        "first step": first_step,
        "run": os.environ["TORCHELASTIC_RUN_ID"],
        "group": [int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])],
    }


def run(folder: str, *, name: str, mode: str = "plain", after: str = "", **settings: Any) -> None:
    deadline = time.monotonic() + 100
    while after and not Path(after).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"num_nodes": 2, "num_processes": 2, "rdzv_id": name, "timeout": 100}
    outcome: dict[str, Any] = {"before": model.weight.flatten().tolist()}
    started = time.monotonic()
    try:
        config = RunConfig(**{"rdzv_backend": "c10d"} | options | settings)
        results = notebook_launcher(train, (model, folder, mode), config=config)
        outcome["results"] = list(results)
    except BaseException as error:
        outcome["error"] = [type(error).__name__, str(error), isinstance(error, ValueError)]
    outcome["seconds"] = time.monotonic() - started
    outcome["weights"] = model.weight.flatten().tolist()
    tell(**{name: outcome})


def main() -> None:
    folder, runs = sys.argv[1:3]
    for facts in json.loads(runs):
        run(folder, **facts)


if __name__ == "__main__":
    main()
