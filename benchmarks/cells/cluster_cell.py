"""What benchmarks/cluster.py measures on one node: `cluster_cell.py PART SETTINGS`, or by torchrun.

`start`: a group of all ranks and a barrier. `hand over`: the same, with a model of 1 GiB that every
rank reads. `and back`: the first rank of each node changes it, and the user has the new weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

MODEL_BYTES = 1 << 30


def make_model() -> nn.Module:
    return nn.Linear(1 << 14, MODEL_BYTES // 4 // (1 << 14), bias=False)


def work(model: nn.Module | None, changes: bool) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    total = 0.0
    with torch.no_grad():
        if model is not None:
            total = float(model.weight.sum())
        # On every node: a notebook of its own gets the weights of its own first rank.
        if model is not None and changes and os.environ["LOCAL_RANK"] == "0":
            model.weight.add_(1.0)
    dist.barrier()
    return total


def in_nbaccel(part: str, settings: dict[str, object]) -> None:
    from nbaccel import notebook_launcher

    model = None if part == "start" else make_model()
    before = 0.0 if model is None else float(model.weight.detach()[0, 0])
    begun = time.monotonic()
    results = notebook_launcher(work, (model, part == "and back"), **settings)
    seconds = time.monotonic() - begun
    assert len(set(results)) == 1
    if model is not None:
        expected = before + (part == "and back")
        assert abs(float(model.weight.detach()[0, 0]) - expected) < 1e-5, (
            "the weights are not at home"
        )
    print("TOLD " + json.dumps({"seconds": seconds}), flush=True)


def under_torchrun(part: str, folder: str) -> None:
    model = None
    if part != "start":
        model = make_model()
        model.load_state_dict(torch.load(f"{folder}/model.pt", mmap=True))
    work(model, part == "and back")
    if part == "and back" and os.environ["RANK"] == "0" and model is not None:
        torch.save(model.state_dict(), f"{folder}/trained.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        under_torchrun(sys.argv[1], sys.argv[2])
    else:
        in_nbaccel(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
