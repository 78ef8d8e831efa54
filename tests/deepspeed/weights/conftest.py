"""Real checkpoints, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.isolation import ROOT


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``one`` and ``two``, by the number of ranks, with a checkpoint for each case."""
    folder = tmp_path_factory.mktemp("saved")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.deepspeed.weights.saved", str(folder)],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder
