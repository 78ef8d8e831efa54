"""``nbaccel test``: a verdict on a set-up, and what to do where it does not train."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nbaccel.cli import main
from tests.cli import scripts
from tests.programs import run_program

CHECK_NAMES = (
    *("processes", "collectives", "seeds", "data loader", "precision", "training", "checkpoint"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--cpu", "-n", "2"],
        ["--cpu", "-n", "2", "--use_fsdp", "--mixed_precision", "bf16"],
        ["--cpu", "-n", "2", "--gradient_accumulation_steps", "2"],
    ],
    ids=["one", "two", "fsdp", "accumulation"],
)
def test_a_set_up_that_trains(words: list[str], capfd) -> None:
    assert main(["test", *words]) == 0
    printed = capfd.readouterr().out
    assert [line.partition("  ")[0] for line in printed.splitlines() if " OK " in line] == [
        *CHECK_NAMES
    ]
    assert "This set-up trains" in printed


def test_the_settings_are_those_of_the_file_and_what_cannot_be_is_refused(
    tmp_path: Path, capfd
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_processes: 2\ndevice: cpu\nmixed_precision: bf16\n")
    assert main(["test", "--config_file", str(file)]) == 0
    assert "2 CPU workers, 1 thread each, bf16" in capfd.readouterr().out
    assert main(["test", "--multi_gpu", "-n", "2", "--mixed_precision", "fp17"]) == 2
    assert "'fp17'" in capfd.readouterr().err


@pytest.mark.slow
def test_what_is_broken_is_named_with_a_remedy(tmp_path: Path) -> None:
    """Random numbers that rank 1 alone draws, by what Python loads at its start."""
    scripts.write(
        tmp_path / "breaks" / "sitecustomize.py",
        """
        import os, sys
        from importlib.abc import MetaPathFinder

        class Breaks(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "nbaccel.cli.set_up_checks":
                    import torch
                    seed_before = torch.manual_seed
                    rank = lambda: int(os.environ["RANK"])
                    torch.manual_seed = lambda seed: seed_before(seed + rank())
                return None

        sys.meta_path.insert(0, Breaks())
        """,
    )
    path = os.pathsep.join([str(tmp_path / "breaks"), scripts.environment()["PYTHONPATH"]])
    done = run_program(
        [sys.executable, "-m", "nbaccel", "test", "--cpu", "-n", "2"],
        env={**scripts.environment(), "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "does not train: seeds failed." in done.stderr
