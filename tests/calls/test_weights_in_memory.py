"""Weights changed without an optimizer: read in rank 0's memory, which waits until then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import WorkerDied, WorkerFailed, notebook_launcher
from nbaccel.errors import LaunchInterrupted
from nbaccel.transfer import memfd
from nbaccel.transfer.weight_receiver import WeightReceiver
from tests.process import lives

NUM_BYTES = 256 * 256 * 4


def model_of_zeros() -> nn.Module:
    model = nn.Linear(256, 256, bias=False)
    nn.init.zeros_(model.weight)
    return model


def add_one(model: nn.Linear) -> int:
    with torch.no_grad():
        model.weight.add_(1)
    return os.getpid()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each call reads in a worker; questions whether it may be read are left out."""
    found, read = [], memfd.read_process

    def noted(process_id: int, byte_moves: Any) -> int:
        num_bytes = sum(size for _, _, size in byte_moves)
        if num_bytes > 1:
            assert lives(process_id)
            found.append(num_bytes)
        return read(process_id, byte_moves)

    monkeypatch.setattr(memfd, "read_process", noted)
    return found


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the staging files of each launch take."""
    found, close = [], WeightReceiver.close

    def noted(self: WeightReceiver, *args: Any) -> None:
        found.append(sum(os.fstat(fd).st_blocks * 512 for fd in self.staging.values()))
        close(self, *args)

    monkeypatch.setattr(WeightReceiver, "close", noted)
    return found


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_they_are_read_once_and_no_staging_file_grows(
    start_method: str, moves: list[int], staged: list[int]
) -> None:
    model = model_of_zeros()
    pids = notebook_launcher(add_one, (model,), 2, start_method=start_method)
    assert (moves, staged) == ([NUM_BYTES], [0])
    assert (model.weight == 1).all()
    assert not any(map(lives, pids)), "rank 0 has left, too"


def test_where_memory_may_not_be_read_they_come_through_the_file(
    moves: list[int], staged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memfd, "can_read_process", lambda process_id: False)
    model = model_of_zeros()
    notebook_launcher(add_one, (model,), 2)
    assert (moves, staged) == ([], [NUM_BYTES])
    assert (model.weight == 1).all()


def test_a_rank_0_that_leaves_long_before_the_others_has_staged_them(
    moves: list[int], staged: list[int]
) -> None:
    def last(model: nn.Linear) -> None:
        if os.environ["RANK"] == "0":
            add_one(model)
        else:
            parent = os.getppid()
            while len(_children(parent)) > 1:  # rank 0 is there
                time.sleep(0.05)

    model = model_of_zeros()
    notebook_launcher(last, (model,), 2, start_method="template")
    assert (moves, staged) == ([], [NUM_BYTES])
    assert (model.weight == 1).all()


def test_a_rank_0_that_is_killed_while_it_waits_fails_the_launch_and_the_model_is_old(
    tmp_path: Path,
) -> None:
    sign = tmp_path / "pid"

    def killing(model: nn.Linear) -> None:
        if os.environ["RANK"] == "0":
            add_one(model)
            sign.write_text(str(os.getpid()))
            return
        while not sign.exists() or not sign.read_text() or not _waits(int(sign.read_text())):
            time.sleep(0.02)
        os.kill(int(sign.read_text()), signal.SIGKILL)
        time.sleep(30)

    model = model_of_zeros()
    with pytest.raises(WorkerDied, match="rank 0 of 2 was killed by SIGKILL"):
        notebook_launcher(killing, (model,), 2, start_method="template")
    assert (model.weight == 0).all()


def test_a_rank_that_fails_after_rank_0_has_returned_leaves_the_model_old(
    moves: list[int],
) -> None:
    def failing(model: nn.Linear) -> None:
        add_one(model)
        if os.environ["RANK"] == "1":
            time.sleep(0.2)
            raise ValueError("too late")

    model = model_of_zeros()
    with pytest.raises(WorkerFailed, match="too late"):
        notebook_launcher(failing, (model,), 2)
    assert moves == []
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


def test_stop_after_they_were_read_tells_that_the_model_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply: Callable[..., None] = WeightReceiver.apply

    def then_stop(self: WeightReceiver, *args: Any, **settings: Any) -> None:
        apply(self, *args, **settings)
        os.kill(holder[0], signal.SIGSTOP)
        # Only now: what came before takes as long as the machine needs.
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    holder: list[int] = []
    read = memfd.read_process

    def noted(process_id: int, byte_moves: Any) -> int:
        holder[:] = [process_id]
        return read(process_id, byte_moves)

    monkeypatch.setattr(memfd, "read_process", noted)
    monkeypatch.setattr(WeightReceiver, "apply", then_stop)
    model = model_of_zeros()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(LaunchInterrupted, match="the notebook's model has the new weights"):
            notebook_launcher(add_one, (model,), 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert (model.weight == 1).all()
    assert not lives(holder[0])


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _waits(pid: int) -> bool:
    """Whether a worker has returned and waits for a message."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    except psutil.NoSuchProcess:
        return False
