"""A thread for each core, as torch_xla trains on v2 and v3: four threads against one replica.

nbaccel gives a worker one core there. What is tried is that its way of moving a model also serves
those who start threads: each has a copy of the model, and gradients are averaged by XLA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nbaccel import RunConfig, notebook_launcher
from tests.isolation import ROOT
from tests.tpu import bodies

THREADS, STEPS = 4, 3
# Without these, replicas on the processor wait for each other in different programs (2.9).
VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": str(THREADS),
    "PJRT_CPU_ASYNC_CLIENT": "0",
    "XLA_THREAD_POOL_SIZE": "16",
}
PROGRAM = """
import copy, json, threading
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
from nbaccel.devices.tpu.drivers import move_parameters
from tests.tpu import bodies

model = bodies.make_net()
lock = threading.Lock()

def train():
    rank, device = xr.global_ordinal(), torch_xla.device()
    net = copy.deepcopy(model)  # threads share the object
    move_parameters(net, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    rows = torch.arange(bodies.TRAINED_ROWS).chunk({threads})[rank]
    words, targets = (one[rows].to(device) for one in bodies.make_data(bodies.TRAINED_ROWS))
    losses = []
    for _ in range({steps}):
        loss = torch.nn.functional.cross_entropy(net(words), targets)
        loss.backward()
        xm.reduce_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with lock:  # the second one finds the first one's program
            torch_xla.sync()
        losses.append(loss.item())
    return losses, net.head.weight is net.embedding.weight, net.body.weight.sum().item()

seen = pjrt._run_thread_per_device(0, 1, train, pjrt.initialize_multiprocess)
print(json.dumps(list(seen.values())))
"""


def test_four_threads_train_as_one_replica(driver: str) -> None:
    if driver != "torch_xla":
        pytest.skip("needs torch_xla: the other driver has one device in a process")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(threads=THREADS, steps=STEPS)],
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    by_thread = json.loads(done.stdout.splitlines()[-1])
    net, expected = _train_whole()
    assert len(by_thread) == THREADS
    for _, is_tied, weight_sum in by_thread:
        assert is_tied
        assert weight_sum == pytest.approx(net.body.weight.sum().item(), abs=1e-4)
    for step, loss in enumerate(expected):
        losses = [losses[step] for losses, _, _ in by_thread]
        assert sum(losses) / THREADS == pytest.approx(loss, abs=1e-5)


def _train_whole() -> tuple[bodies.TiedNet, list[float]]:
    import torch

    net = bodies.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    words, targets = bodies.make_data(bodies.TRAINED_ROWS)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(net(words), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return net, losses


# ------------------------------------------ one process on all devices, cut up by XLA's partitioner


DEVICES = 4


def test_losses_are_those_of_one_replica_and_weights_are_really_cut_up(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver != "torch_xla":
        pytest.skip("only torch_xla has a mode in which one process drives all chips")
    monkeypatch.setenv("CPU_NUM_DEVICES", str(DEVICES))
    expected = bodies.train_whole(bodies.make_net(), 2)
    net = bodies.make_net()
    before = net.body.weight.detach().clone()
    config = RunConfig(device="tpu", strategy="spmd")
    ((losses, specs, rows),) = notebook_launcher(bodies.train_sharded, (net,), config=config)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert specs["embedding.weight"] == f"{{devices=[{DEVICES},1]0,1,2,3}}"
    assert specs["body.weight"] == f"{{devices=[{DEVICES},1]0,1,2,3}}"
    assert specs["body.bias"] == f"{{devices=[{DEVICES}]0,1,2,3}}"
    assert rows == [bodies.WIDTH // DEVICES] * DEVICES
    assert not net.body.weight.detach().equal(before)
