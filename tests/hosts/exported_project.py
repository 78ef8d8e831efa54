"""A notebook whose export trains on a cluster, and what the job has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.isolation import ROOT

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


def export_project(folder: Path, cluster: str, num_nodes: int) -> None:
    """A notebook with a module beside it, and its export for nodes of two workers."""
    source_cells = [{"cell_type": "code", "source": cell} for cell in CELLS]
    cells = [
        {"execution_count": None, "metadata": {}, "outputs": []} | cell for cell in source_cells
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (folder / "out").mkdir(parents=True)
    (folder / "n.ipynb").write_text(json.dumps(notebook))
    (folder / "helper_beside_the_notebook.py").write_text(HELPER)
    words = ["--to", cluster, "--device", "cpu", "--nproc-per-node", "2"]
    words += ["--num-nodes", str(num_nodes), "n.ipynb"]
    subprocess.run([sys.executable, "-m", "nbaccel", "export", *words], cwd=folder, check=True)


def job_variables(folder: Path) -> dict[str, str]:
    """Where the job finds nbaccel, and where it is to leave its weights."""
    return {"OUT": str(folder / "out"), "PYTHONPATH": str(ROOT)}


def path_with_tools() -> str:
    """PATH with the commands of this Python's environment: the image of a cluster has them."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def check_trained(folder: Path, output: str, num_workers: int) -> None:
    """All workers have trained together: they have the same weights."""
    import torch

    assert f"trained by {num_workers}" in output, output
    weights: list[Any] = [torch.load(path) for path in sorted((folder / "out").iterdir())]
    assert len(weights) == num_workers, output
    for of_rank in weights[1:]:
        assert all(torch.equal(*pair) for pair in zip(weights[0], of_rank, strict=True))
