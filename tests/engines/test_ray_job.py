"""The Ray job that `nbaccel export` writes, handed in to a real raylet."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None,
        reason="jobs need Ray's dashboard: pip install 'ray[default]'",
    ),
]

CELLS = [
    "import os\nimport torch\nfrom pathlib import Path\nfrom nbaccel import Accelerator, "
    "notebook_launcher\nimport helper_beside_the_notebook as helper",
    "def train(model, folder):\n"
    "    accelerator = Accelerator(cpu=True)\n"
    "    model, optimizer = accelerator.prepare(\n"
    "        model, torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "    )\n"
    "    for _ in range(3):\n"
    "        accelerator.backward(helper.loss_of(model, accelerator.process_index))\n"
    "        optimizer.step()\n"
    "        optimizer.zero_grad()\n"
    "    accelerator.print('trained by', accelerator.num_processes)\n"
    "    weights = [p.detach() for p in accelerator.unwrap_model(model).parameters()]\n"
    "    torch.save(weights, Path(folder, f'{accelerator.process_index}.pt'))",
    "torch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1)",
    "notebook_launcher(train, (model, os.environ['OUT']), num_processes=2)",
]
HELPER = """import torch


def loss_of(model, rank):
    return model(torch.full((2, 4), 1.0 + rank)).square().mean()
"""


@contextlib.contextmanager
def running_ray() -> Iterator[str]:
    """Where a raylet of four CPUs takes jobs."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engines.ray_head"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as head:
        try:
            lines = iter(head.stdout.readline, "")
            yield next(line.split()[-1] for line in lines if line.startswith("JOBS AT"))
        finally:
            head.stdin.close()
            try:
                head.wait(120)
            except subprocess.TimeoutExpired:  # with its raylet
                os.killpg(head.pid, signal.SIGKILL)


def write_project(folder: Path) -> None:
    source_cells = [{"cell_type": "code", "source": cell} for cell in CELLS]
    cells = [
        {"execution_count": None, "metadata": {}, "outputs": []} | cell for cell in source_cells
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (folder / "out").mkdir(parents=True)
    (folder / "n.ipynb").write_text(json.dumps(notebook))
    (folder / "helper_beside_the_notebook.py").write_text(HELPER)


@dataclass(frozen=True)
class JobOutcome:
    status: int
    output: str
    weights: list[list[Any]]
    """Of each rank."""


def hand_in(num_nodes: int, jobs_address: str, folder: Path) -> JobOutcome:
    """Export a notebook for so many nodes, and run the shell script that this gives."""
    import torch

    write_project(folder)
    words = ["--to", "ray", "--device", "cpu", "--nproc-per-node", "2"]
    words += ["--num-nodes", str(num_nodes), "n.ipynb"]
    subprocess.run([sys.executable, "-m", "nbaccel", "export", *words], cwd=folder, check=True)
    # The nodes have nbaccel, as the image of a cluster would.
    variables = {"OUT": str(folder / "out"), "PYTHONPATH": str(ROOT)}
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "n_ray.sh"],
        cwd=folder,
        env=os.environ
        | {"RUNTIME_ENV": json.dumps({"env_vars": variables})}
        | {"RAY_ADDRESS": jobs_address, "PATH": tools},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    weights = [torch.load(path) for path in sorted((folder / "out").iterdir())]
    return JobOutcome(done.returncode, done.stdout + done.stderr, weights)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, JobOutcome]:
    folder = tmp_path_factory.mktemp("ray_jobs")
    with running_ray() as jobs_address:
        return {
            num_nodes: hand_in(num_nodes, jobs_address, folder / str(num_nodes))
            for num_nodes in (1, 2)
        }


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_exported_job_trains_on_a_cluster(num_nodes, outcomes):
    import torch

    outcome = outcomes[num_nodes]
    assert outcome.status == 0, outcome.output
    assert f"trained by {2 * num_nodes}" in outcome.output
    assert len(outcome.weights) == 2 * num_nodes
    for of_rank in outcome.weights[1:]:
        assert all(torch.equal(*pair) for pair in zip(outcome.weights[0], of_rank, strict=True))
