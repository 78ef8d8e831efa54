"""What is done with a Ray cluster of three nodes on this machine: real raylets, one notebook.

A process of its own, because Ray leaves threads, variables and signal handlers in a notebook.
Prints one line of JSON per scene, after `SCENE`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from IPython.display import display
from torch import nn

from tests.hosts.one_ray import RAY_VARIABLES

os.environ.update(RAY_VARIABLES)

import ray
from ray.cluster_utils import Cluster

from nbaccel import notebook_launcher

STEPS = 4


def model_of(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def train(model: nn.Module) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} has trained")
    for i in range(5 if dist.get_rank() == 3 else 0):
        print(f"before {i}")
        display({"text/plain": f"picture {i}"}, raw=True)
        print(f"after {i}")
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "parent": os.getppid()}


def weights_of(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def trained_on_ray() -> dict[str, Any]:
    model, local = model_of(), model_of()
    before = weights_of(model)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        results = notebook_launcher(train, (model,), engine="ray", num_processes=4)
    notebook_launcher(train, (local,), 4)
    return {
        "ranks": [result["rank"] for result in results],
        "templates": len({result["parent"] for result in results}),
        "plan": results.plan.explain(),
        "output": output.getvalue(),
        "is trained": weights_of(model) != before,
        "equals one host": weights_of(model) == weights_of(local),
    }


def sums(model: nn.Module) -> float:
    with torch.no_grad():
        total = float(model[0].weight.double().sum())
        model[0].weight.add_(1.0)
    return total


def carried_model() -> dict[str, Any]:
    """32 MiB, which Ray's object store carries once per node and launch."""
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False))
    with torch.no_grad():
        # Whole numbers: the sum is exact in whatever order.
        model[0].weight.mul_(1000).round_()
    expected = float(model[0].weight.detach().double().sum())
    stored: list[int] = []
    put = ray.put

    def noted(pieces: list[tuple[int, Any]]) -> Any:
        stored.append(sum(content.nbytes for _, content in pieces))
        return put(pieces)

    ray.put = noted
    try:
        first = notebook_launcher(sums, (model,), engine="ray", num_processes=4)
        after = float(model[0].weight.detach().double().sum())
        second = notebook_launcher(sums, (model,), engine="ray", num_processes=4)
    finally:
        ray.put = put
    return {
        "first": list(first),
        "expected": expected,
        "after": after,
        "second": list(second),
        "stored": [num_bytes for num_bytes in stored if num_bytes >= 32 << 20],
    }


def too_many_workers() -> dict[str, Any]:
    try:
        notebook_launcher(train, (model_of(),), engine="ray", num_processes=40)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {}


def resumes(model: nn.Module, folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = Path(folder) / "steps"
    step = int(checkpoint.read_text()) if restarts else 0
    first_step = step
    while step < 40:
        dist.all_reduce(torch.ones(2))
        step += 1
        if dist.get_rank() == 0:
            checkpoint.with_suffix(".new").write_text(str(step))
            checkpoint.with_suffix(".new").rename(checkpoint)
        dist.barrier()
        time.sleep(0.1)
    return {"restarts": restarts, "first step": first_step, "world": dist.get_world_size()}


def node_lost(cluster: Cluster, folder: Path) -> dict[str, Any]:
    victims = []

    def remove() -> None:
        wait_until((folder / "steps").exists)
        groups = ray.util.placement_group_table().values()
        used_nodes = {
            node_id
            for group in groups
            if group["state"] == "CREATED"
            for node_id in group["bundles_to_node_id"].values()
        }
        # Not the head: the cluster ends with it.
        victims.append(next(n for n in cluster.worker_nodes if n.node_id in used_nodes))
        cluster.remove_node(victims[0], allow_graceful=False)

    thread = threading.Thread(target=remove)
    thread.start()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            results = notebook_launcher(
                resumes, (model_of(), str(folder)), engine="ray", num_processes=4, max_restarts=2
            )
    finally:
        thread.join()
    return {"results": list(results), "errors": errors.getvalue(), "victim": victims[0].node_id}


def wait_until(is_so: Callable[[], object], timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def actor_processes() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "NodeActor" in " ".join(process.info["cmdline"] or [])
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "lost").mkdir()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    scenes: dict[str, Callable[[], dict[str, Any]]] = {
        "trained": trained_on_ray,
        "carried": carried_model,
        "too many": too_many_workers,
        "lost": lambda: node_lost(cluster, folder / "lost"),
    }
    try:
        for name in sys.argv[2:] or scenes:
            try:
                outcome = scenes[name]()
            except BaseException as error:
                outcome = {"scene failed": f"{type(error).__name__}: {error}"}
            # Ray takes time to end the processes of actors that were killed.
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: not actor_processes(), timeout_s=10)
            outcome["actors left"] = actor_processes()
            groups = ray.util.placement_group_table().values()
            outcome["groups left"] = [g for g in groups if g["state"] != "REMOVED"]
            print("SCENE", json.dumps([name, outcome]), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
