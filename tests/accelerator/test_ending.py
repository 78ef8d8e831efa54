"""What an accelerator leaves behind in a notebook, and beside a launcher: nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # sets a variable of its own when the first optimizer imports it
import torch.distributed as dist

from nbaccel import Accelerator, notebook_launcher
from tests.accelerator.loops import line, numbers, rows, sgd, weight
from tests.isolation import ROOT, isolated

pytestmark = pytest.mark.slow


def train() -> Any:
    accelerator = Accelerator(cpu=True)
    model = line()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), numbers(4, 1))
    seen = []
    for batch in accelerator.progress(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[0]).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen += rows(batch)
    return accelerator.num_processes, seen, weight(model)


@pytest.mark.parametrize("method", ["template", "fork"])
@isolated(timeout_s=800)
def test_a_bare_cell_may_be_followed_by_a_launch(method: Any) -> None:
    before = dict(os.environ)
    alone = train()
    assert alone[:2] == (1, [0, 1, 2, 3])
    assert not dist.is_initialized()
    assert dict(os.environ) == before

    torch.set_num_threads(1)
    first, second = notebook_launcher(train, num_processes=2, start_method=method)
    assert (first[:2], second[:2]) == ((2, [0, 2]), (2, [1, 3]))
    assert first[2] == second[2] == pytest.approx(1 - 0.1 * (0.5 + 2.5))
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert train()[:2] == (1, [0, 1, 2, 3])


IN_A_ROW = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nbaccel import Accelerator

found = []
for trial in range(3):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    found += accelerator.gather(torch.tensor([accelerator.process_index + 10 * trial])).tolist()
    found.append(dist.is_initialized())
    accelerator.end_training()
    accelerator.end_training()
found.append(dist.is_initialized())
Path(sys.argv[1], str(accelerator.process_index)).write_text(str(found))
"""


@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_accelerators_in_a_row_each_meet_the_others_anew(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_A_ROW)
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ways = {
        "torchrun": [(run, {})],
        "none": [([sys.executable], {**address, "RANK": str(rank)}) for rank in (0, 1)],
    }
    started = [
        subprocess.Popen([*command, str(script), str(tmp_path)], env={**base, **variables})
        for command, variables in ways[launcher]
    ]
    try:
        assert [process.wait(timeout=100) for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    for rank in ("0", "1"):
        told = "[0, 1, True, 10, 11, True, 20, 21, True, False]"
        assert (tmp_path / rank).read_text() == told
