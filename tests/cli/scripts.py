"""Scripts as users write them, for the command to run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.isolation import ROOT
from tests.programs import run_program

PLACES = """
    import argparse, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    if __name__ == "__main__":
        print(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, lr {arguments.lr}, "
            f"{arguments.rest}, {sys.argv[0]}, {sys.path[0]}"
        )
"""

TRAINS = """
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from nbaccel import Accelerator, set_seed

    class Net(torch.nn.Linear):
        pass

    def main():
        set_seed(0)
        accelerator = Accelerator()
        model = Net(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model), sys.argv[1])
            loaded = torch.load(sys.argv[1], weights_only=False)
            print(type(loaded).__module__, loaded.weight.sum().item())

    if __name__ == "__main__":
        main()
"""


def write(path: Path, text: str) -> Path:
    """A script in a folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def environment() -> dict[str, str]:
    """That of a shell in which this checkout is installed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}


def of_rank(rank: int, printed: str) -> list[str]:
    """A rank's lines, in order, whether they were shown together with another's or not."""
    lines = [line.partition("] ") for line in printed.splitlines() if line.startswith("[")]
    return [text for ranks, _, text in lines if ranks in (f"[{rank}", "[0-1")]


def nbaccel(*words: str, folder: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    return run_program(
        [sys.executable, "-m", "nbaccel", *words],
        cwd=folder,
        env=environment(),
        check=False,
        timeout=timeout_s,
    )
