"""What benchmarks/cluster.py measures with Ray: `ray_cell.py SUBJECT PART FOLDER`.

Two raylets of this machine stand for two machines; their start is not counted. SUBJECT is `nbaccel`
(engine="ray") or `trainer`: ray.train.torch.TorchTrainer, which gets the model from Ray's object
store, and gives it back by a checkpoint, as Ray's guides have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

import cluster_cell

STORE_BYTES = 4 << 30


def train_with_ray(config: dict[str, Any]) -> None:
    """What :func:`cluster_cell.work` does, in a worker that Ray Train has made."""
    import tempfile

    import ray.train
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    is_first = ray.train.get_context().get_world_rank() == 0
    checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            if config["model"]:
                model = ray.get(config["model"][0])
                float(model.weight.sum())
                if config["changes"] and is_first:
                    model.weight.add_(1.0)
                    torch.save(model.state_dict(), f"{folder}/model.pt")
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
        dist.barrier()
        ray.train.report({}, checkpoint=checkpoint)


def by_trainer(part: str, folder: str) -> float:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    model = None if part == "start" else cluster_cell.make_model()
    changes = part == "and back"
    begun = time.monotonic()
    trainer = TorchTrainer(
        train_with_ray,
        # In a list: a reference that is an argument itself would be fetched before the call.
        train_loop_config={"model": [ray.put(model)] if model else [], "changes": changes},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
    )
    result = trainer.fit()
    if changes:
        before = float(model.weight.detach()[0, 0])
        with result.checkpoint.as_directory() as made:
            model.load_state_dict(torch.load(f"{made}/model.pt", mmap=True))
        assert abs(float(model.weight.detach()[0, 0]) - before - 1) < 1e-5, (
            "the weights are not at home"
        )
    return time.monotonic() - begun


def main() -> None:
    subject, part, folder = sys.argv[1:]
    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        if subject == "nbaccel":
            cluster_cell.in_nbaccel(part, {"engine": "ray", "num_processes": 4})
        else:
            print("TOLD " + json.dumps({"seconds": by_trainer(part, folder)}), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
