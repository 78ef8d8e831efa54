"""Real checkpoints, made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.deepspeed.programs import told_by


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``one`` and ``two``, by the number of ranks, with a checkpoint for each case."""
    base = tmp_path_factory.getbasetemp()
    # Test workers of one run have folders side by side; whoever comes first makes it for all.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "saved"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            made = base / "saved-in-the-making"
            made.mkdir()
            told_by("tests.deepspeed.weights.saved", str(made), timeout_s=800)
            made.rename(folder)
    return folder
