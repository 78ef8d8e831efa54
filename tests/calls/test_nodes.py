"""Several nodes (two notebooks on one machine, meeting at its real address) and restarts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from nbaccel import WorkerFailed, notebook_launcher

NODE = """
import sys, torch
from torch import nn
from nbaccel import notebook_launcher

def train(model):
    import os, torch.distributed as dist
    dist.init_process_group("gloo")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])

torch.manual_seed(0)
model = nn.Linear(4, 1)
node, address, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
results = notebook_launcher(train, (model,), 2, num_nodes=2, node_rank=node, master_addr=address,
                            use_port=port, timeout=60)
print(list(results), model.weight.flatten().tolist())
"""


def own_address() -> str:
    """An address of this machine that is not loopback: nodes cannot meet on loopback."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    pytest.skip("this machine has no address besides loopback for two nodes to meet at")


def interface_of(address: str) -> str:
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(found.address == address for found in addresses)
    )


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def start_nodes(folder: Path, text: str, count: int) -> list[subprocess.Popen[str]]:
    """Start a script as the first nodes of two."""
    address = own_address()
    script = folder / "node.py"
    script.write_text(text)
    port = str(free_port(address))
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(node), address, port],
            stdout=subprocess.PIPE,
            text=True,
            # A host name need not resolve in a sandbox; gloo is told the address's interface.
            env=os.environ | {"GLOO_SOCKET_IFNAME": interface_of(address)},
        )
        for node in range(count)
    ]


@pytest.mark.slow
def test_two_nodes_train_together_and_each_gets_the_weights(tmp_path):
    nodes = start_nodes(tmp_path, NODE, 2)
    outputs = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    first, second = (output.strip().rpartition("] [") for output in outputs)
    assert outputs[0].startswith("[(0, 4, 0), (1, 4, 1)]")
    assert outputs[1].startswith("[(2, 4, 0), (3, 4, 1)]")
    assert first[2] == second[2]  # DDP averages over all four: both notebooks have the same model


MISSED = """
import sys, torch
from datetime import timedelta
from torch import nn
from nbaccel import notebook_launcher

def train(model):
    import time, torch.distributed as dist
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    print("met", flush=True)
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)

model = nn.Linear(4, 1)
node, address, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
try:
    notebook_launcher(train, (model,), 1, num_nodes=2, node_rank=node, master_addr=address,
                      use_port=port, timeout=60)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("comes", [False, True])
def test_a_node_that_is_lost_is_named(comes, tmp_path):
    """One that never comes, and one that is killed with its workers."""
    nodes = start_nodes(tmp_path, MISSED, 1 + comes)
    if comes:
        assert "met" in nodes[1].stdout.readline()
        nodes[1].kill()
        nodes[1].communicate()
    output = nodes[0].communicate(timeout=100)[0]
    assert "WorkerFailed" in output
    assert "rank 0 of 2" in output
    told = "This is node 0 of 2. Nothing but a broken connection or a timeout tells of another one"
    assert f"{told} that is lost: look at node 1 (ranks 1 to 1)." in output


def fail_until(path: str, times: int, model: nn.Module) -> str:
    with torch.no_grad():
        model.weight += 1
    if os.environ["RANK"] == "1":
        with Path(path).open("a") as file:
            file.write("x")
        if Path(path).stat().st_size <= times:
            raise ValueError(f"attempt {Path(path).stat().st_size}")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_failed_workers_are_started_anew(tmp_path, capfd):
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="attempt 2") as caught:
        notebook_launcher(fail_until, (str(tmp_path / "a"), 9, model), 2, max_restarts=1)
    assert isinstance(caught.value, WorkerFailed)
    assert torch.equal(model.weight, before)
    capfd.readouterr()
    results = notebook_launcher(fail_until, (str(tmp_path / "b"), 2, model), 2, max_restarts=3)
    assert results == ["2", "2"]
    assert torch.equal(model.weight, before + 1)  # each attempt began with the notebook's weights
    said = capfd.readouterr().err
    assert "rank 1 of 2 raised ValueError: attempt 1. Restart 1 of 3." in said
    assert "attempt 2. Restart 2 of 3." in said
