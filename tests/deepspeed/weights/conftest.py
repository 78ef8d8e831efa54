"""Real checkpoints, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deepspeed.programs import told_by


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``one`` and ``two``, by the number of ranks, with a checkpoint for each case."""
    folder = tmp_path_factory.mktemp("saved")
    return Path(told_by("tests.deepspeed.weights.saved", str(folder), timeout_s=115))
