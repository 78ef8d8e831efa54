"""Launches beside a live CUDA context: models on the device, and what the device has left after.

Each body runs in a fresh process, because a CUDA context cannot be taken back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel import WorkerDied, notebook_launcher
from nbaccel.errors import UnsafeFork
from tests import worker_functions as workers
from tests.isolation import isolated

pytestmark = pytest.mark.gpu

MIB = 2**20
NOISE_BYTES = 64 * MIB  # others' display servers and the driver's own bookkeeping
GIVEN_BACK_S = 20.0  # the driver frees a dead process's context in its own time


def free_bytes() -> list[int]:
    """Free memory of each GPU, asked of the driver without a context."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def assert_given_back(before: list[int]) -> None:
    deadline = time.monotonic() + GIVEN_BACK_S
    while time.monotonic() < deadline:
        missing = [b - a for b, a in zip(before, free_bytes(), strict=True)]
        if max(missing) < NOISE_BYTES:
            return
        time.sleep(0.1)
    pytest.fail(f"the devices lack {[m // MIB for m in missing]} MiB")


def wake() -> None:
    """What cells do before a launch: a tensor on the device, a product, a backward."""
    a = torch.randn(256, 256, device="cuda", requires_grad=True)
    (a @ a).sum().backward()
    torch.cuda.synchronize()


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}


def assert_home(module: nn.Module, trained: dict[str, torch.Tensor], device: str) -> None:
    for name, tensor in module.state_dict().items():
        assert tensor.device.type == device, name
        assert torch.equal(tensor.cpu(), trained[name]), name


def train(model: nn.Module, backend: str) -> tuple[dict[str, torch.Tensor], str, int]:
    """Train on this worker's device; returns the weights, the device, and where it got them."""
    dist.init_process_group(backend)
    came_on = next(model.parameters()).device.type
    device = torch.device("cuda", torch.cuda.current_device())
    model.to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    for step in range(3):
        torch.manual_seed(step + 10 * dist.get_rank())
        optimizer.zero_grad()
        parallel(torch.randn(4, 32, device=device)).pow(2).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    found = values(model)
    dist.destroy_process_group()
    return found, came_on, device.index


@isolated(timeout_s=800)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_one_worker_per_gpu_beside_a_live_context(where: str) -> None:
    wake()
    count = torch.cuda.device_count()
    model = nn.Linear(32, 32).to(where)
    before, address = values(model), model.weight.data_ptr()
    # One worker would run right here: the template is asked for, so that a process is started.
    results = notebook_launcher(train, (model, "nccl"), count, start_method="template")
    trained, came_on, _ = results[0]
    assert came_on == where
    assert [index for _, _, index in results] == list(range(count))
    assert_home(model, trained, where)
    assert not torch.equal(trained["weight"], before["weight"])
    if where == "cuda":
        assert model.weight.data_ptr() == address, "the notebook's tensor stays where it is"
    wake()


@isolated(timeout_s=800)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_two_workers_share_a_gpu_over_gloo(where: str) -> None:
    wake()
    count = 2 * torch.cuda.device_count()
    model = nn.Linear(32, 32).to(where)
    for _ in range(2):
        results = notebook_launcher(train, (model, "gloo"), count, start_method="template")
        assert results.plan.process_group_backend == "gloo"
        indices = [index for _, _, index in results]
        assert indices == [rank % torch.cuda.device_count() for rank in range(count)]
        assert_home(model, results[0][0], where)


@isolated(timeout_s=800)
def test_a_model_with_parts_on_both_sides_and_an_optimizer_comes_home() -> None:
    wake()
    model = nn.ModuleDict({"host": nn.Linear(4, 4), "device": nn.Linear(4, 4).cuda()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change(found: nn.ModuleDict) -> None:
        with torch.no_grad():
            for number, p in enumerate(found.parameters()):
                p.fill_(number + 1)

    notebook_launcher(change, (model,), 2, start_method="template")
    assert [float(p.detach().mean()) for p in model.parameters()] == [1, 2, 3, 4]
    assert [p.device.type for p in model.parameters()] == ["cpu", "cpu", "cuda", "cuda"]
    assert optimizer.param_groups[0]["params"][2] is model["device"].weight


@isolated(timeout_s=800)
def test_tensors_on_the_device_travel_in_arguments_and_closures() -> None:
    batch, table = torch.arange(6, device="cuda"), torch.ones(3, device="cuda")

    def work(x: torch.Tensor) -> tuple[str, float]:
        return x.device.type, float(x.sum() + table.sum())

    assert notebook_launcher(work, (batch,), 2, start_method="template") == [("cuda", 18.0)] * 2


@isolated(timeout_s=800)
def test_a_failed_launch_leaves_the_model_on_the_device_alone() -> None:
    model = nn.Linear(32, 32).cuda()
    before = values(model)

    def fail(net: nn.Module) -> None:
        with torch.no_grad():
            net.weight.zero_()
        torch.cuda.synchronize()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        notebook_launcher(fail, (model,), 2, start_method="template")
    assert_home(model, before, "cuda")


@isolated(timeout_s=800)
def test_an_explicit_fork_is_refused_and_auto_takes_the_template() -> None:
    wake()
    with pytest.raises(UnsafeFork, match=r"(?s)CUDA context.*template"):
        notebook_launcher(workers.nothing, (), 2, start_method="fork")
    assert notebook_launcher(workers.rank, (), 2) == [0, 1]


# ------------------------------------------------------------------------- memory of the device


def hold(folder: str) -> None:
    """Take memory on the device, say so, and stay."""
    held = torch.ones(512 * MIB // 4, device="cuda")
    torch.cuda.synchronize()
    Path(folder, str(os.getpid())).touch()
    time.sleep(workers.FOREVER_S if held.numel() else 0)


def when_held(folder: Path, act: Callable[[list[int]], Any]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        act([int(path.name) for path in folder.iterdir()])

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.alone
@isolated(timeout_s=800)
def test_memory_is_given_back_after_a_launch() -> None:
    wake()
    before = free_bytes()
    for _ in range(3):
        notebook_launcher(train, (nn.Linear(32, 32), "gloo"), 2, start_method="template")
    assert_given_back(before)


@pytest.mark.alone
@isolated(timeout_s=800)
def test_memory_is_given_back_after_a_kill(tmp_path: Path) -> None:
    wake()
    before = free_bytes()
    thread = when_held(tmp_path, lambda pids: os.kill(pids[0], signal.SIGKILL))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        notebook_launcher(hold, (str(tmp_path),), 2, start_method="template")
    thread.join()
    assert_given_back(before)
