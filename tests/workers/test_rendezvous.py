"""Code that chooses an address of its own for its process group, as PyTorch's tutorial on DDP."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import ConfigError, Pool, WorkerFailed, notebook_launcher

TIMEOUT_S = 120.0  # torch's own limit is half an hour

TUTORIAL = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 5)
    loss_fn(outputs, labels).backward()
    optimizer.step()
    cleanup()
    return model.net1.weight.grad.sum().item()

def in_a_worker():
    return demo_basic(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_the_tutorial_on_ddp_trains_again_and_again(start_method, capfd):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TUTORIAL, "<tutorial>", "exec"), names)

    def twice() -> list[float]:
        return [names["in_a_worker"]() for _ in range(2)]

    found = notebook_launcher(twice, (), 2, start_method=start_method, timeout=TIMEOUT_S)
    assert found[0] == found[1]
    told = capfd.readouterr().err
    assert told.count("was told to meet at localhost:12355; the ranks meet at 127.0.0.1:") == 1


@pytest.mark.parametrize(
    ("rank", "world_size", "told"),
    [
        (0, 2, "got rank=0 in the worker of rank 1"),
        (0, 4, "got world_size=4, but there are 2 workers"),
    ],
)
def test_ranks_that_nobody_has_are_refused(rank, world_size, told):
    def meet() -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)

    with pytest.raises(ConfigError, match=told) as caught:
        notebook_launcher(meet, (), 2, timeout=TIMEOUT_S)
    assert isinstance(caught.value, WorkerFailed)


def test_groups_of_some_ranks_meet_by_their_urls_and_stores_of_their_own_serve():
    def meet_in_pairs() -> float:
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            "gloo", init_method=f"tcp://localhost:{12000 + rank // 2}", rank=rank % 2, world_size=2
        )
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return total.item()

    assert list(notebook_launcher(meet_in_pairs, (), 4, timeout=TIMEOUT_S)) == [1.0, 1.0, 5.0, 5.0]

    def meet(port: int) -> float:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    with socket.socket() as sock:  # torch reuses an address that is bound and not listened on
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        found = notebook_launcher(meet, (sock.getsockname()[1],), 2, timeout=TIMEOUT_S)
    assert list(found) == [2.0, 2.0]


def test_the_tutorial_in_live_cells(capfd):
    with Pool(2, namespace={}, timeout=TIMEOUT_S) as pool:
        pool.run(TUTORIAL)
        pool.run("first = in_a_worker()")
        pool.run("second = in_a_worker()")
        found = pool.pull("first", "second")
        pool.run("total = torch.ones(1); dist.all_reduce(total); total = total.item()")
        assert pool.pull("total") == {"total": [2.0, 2.0]}  # a group that nobody has set up
    assert found["first"][0] == found["first"][1]
    assert capfd.readouterr().err.count("was told to meet at localhost:12355") == 1
