"""What only a chip can show. None of it has been run: no TPU was at hand when it was written.

It is written against torch_tpu 0.2, torch_xla 2.9 and what their documentation says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, FullyShardedDataParallelPlugin, RunConfig, notebook_launcher
from tests.tpu import bodies

# XLA's plugin for processors has no collectives between processes, no memory figures, and cannot
# read again what its persistent caches hold; binding a process to one of several chips needs chips.
pytestmark = pytest.mark.tpu


@pytest.fixture(scope="module")
def chips() -> RunConfig:
    """A launch on all chips of this host."""
    return RunConfig(device="tpu")


@pytest.fixture
def torch_tpu(driver: str) -> None:
    if driver != "torch_tpu":
        pytest.skip("needs torch_tpu: torch_xla has no process group of this kind")


def test_tpu_dist_adds_up(torch_tpu, chips):
    def add() -> tuple[str, list[float], int]:
        accelerator = Accelerator()
        own = torch.full((4,), float(accelerator.process_index + 1), device=accelerator.device)
        torch.distributed.all_reduce(own)
        groups = str(torch.distributed.get_backend_config())
        return groups, own.tolist(), accelerator.num_processes

    for groups, added, count in notebook_launcher(add, (), config=chips):
        assert "tpu:tpu_dist" in groups
        assert added == [count * (count + 1) / 2] * 4


def test_every_worker_has_a_chip_of_its_own(chips, driver):
    def held() -> list[int]:
        from nbaccel.devices.tpu.chips import holders_of

        Accelerator()
        files = sorted(map(str, [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]))
        return [files.index(file) for file in files if os.getpid() in holders_of([file])]

    held_files = list(notebook_launcher(held, (), config=chips))
    assert all(held_files)
    assert len({tuple(files) for files in held_files}) == len(held_files)


def test_fsdp_shards_over_chips(torch_tpu, chips):
    def train(net: bodies.TiedNet) -> tuple[int, int]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(fsdp_plugin=plugin)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        prepared, optimizer = accelerator.prepare(net, optimizer)
        words, targets = bodies.make_data(bodies.BATCH)
        scores = prepared(words.to(accelerator.device))
        accelerator.backward(nn.functional.cross_entropy(scores, targets.to(accelerator.device)))
        optimizer.step()
        weight: Any = prepared.body.weight
        return weight.to_local().numel(), weight.numel()

    net = bodies.make_net()
    before = net.body.weight.detach().clone()
    shards = list(notebook_launcher(train, (net,), config=chips))
    assert sum(local for local, _ in shards) == shards[0][1]
    assert not torch.equal(net.body.weight, before)
