"""Weights changed without an optimizer, and what may become of rank 0 before the others return."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from nbaccel import WorkerFailed, notebook_launcher


def model_of_zeros() -> nn.Module:
    model = nn.Linear(256, 256, bias=False)
    nn.init.zeros_(model.weight)
    return model


def add_one(model: nn.Linear) -> int:
    with torch.no_grad():
        model.weight.add_(1)
    return os.getpid()


def test_a_rank_0_that_is_killed_after_its_return_has_left_its_weights(tmp_path: Path) -> None:
    sign = tmp_path / "pid"

    def killing(model: nn.Linear) -> None:
        if os.environ["RANK"] == "0":
            add_one(model)
            sign.write_text(str(os.getpid()))
            return
        while not sign.exists() or not sign.read_text() or not _waits(int(sign.read_text())):
            time.sleep(0.02)
        os.kill(int(sign.read_text()), signal.SIGKILL)

    model = model_of_zeros()
    notebook_launcher(killing, (model,), 2, start_method="template")
    assert (model.weight == 1).all()


def test_a_rank_that_fails_after_rank_0_has_returned_leaves_the_model_old() -> None:
    def failing(model: nn.Linear) -> None:
        add_one(model)
        if os.environ["RANK"] == "1":
            time.sleep(0.2)
            raise ValueError("too late")

    model = model_of_zeros()
    with pytest.raises(WorkerFailed, match="too late"):
        notebook_launcher(failing, (model,), 2)
    assert (model.weight == 0).all()


def test_what_rank_0_prints_as_it_leaves_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def leaving(model: nn.Linear) -> None:
        add_one(model)
        if os.environ["RANK"] == "0":
            subprocess.Popen(["sleep", "60"], start_new_session=True)

    model = model_of_zeros()
    notebook_launcher(leaving, (model,), 2)
    assert (model.weight == 1).all()
    assert "ended what this rank had started and left running" in capfd.readouterr().err


def _waits(pid: int) -> bool:
    """Whether a worker has returned and waits for a message."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    except psutil.NoSuchProcess:
        return False
