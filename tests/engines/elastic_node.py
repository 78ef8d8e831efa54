"""One node of an elastic launch, as a notebook would run it: a script with a number of its own.

Arguments: endpoint, folder, mode, and further settings of the launch as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel import notebook_launcher

STEPS = 8


def train(model: nn.Module, folder: str, mode: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (Path(folder) / f"pid_{restarts}_{rank}").write_text(str(os.getpid()))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    checkpoint = Path(folder) / "checkpoint.pt"
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
        "restarts": restarts,
        "first step": first_step,
        "run": os.environ["TORCHELASTIC_RUN_ID"],
        "group": [os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]],
    }


def main() -> None:
    endpoint, folder, mode, settings = sys.argv[1:5]
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"num_nodes": 2, "num_processes": 2, "rdzv_id": "job"}
    options |= json.loads(settings)
    processes = options.pop("num_processes")
    outcome: dict[str, Any] = {"before": model.weight.flatten().tolist()}
    try:
        results = notebook_launcher(
            train,
            (model, folder, mode),
            processes,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            timeout=100,
            **options,
        )
        outcome["results"] = list(results)
    except BaseException as error:
        outcome["error"] = [type(error).__name__, str(error), isinstance(error, ValueError)]
    outcome["weights"] = model.weight.flatten().tolist()
    print("OUTCOME", json.dumps(outcome))


if __name__ == "__main__":
    main()
