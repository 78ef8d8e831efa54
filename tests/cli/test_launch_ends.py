"""However ``nbaccel launch`` ends, nothing is left, and the shell is told by its status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import scripts
from tests.process import lives

pytestmark = pytest.mark.slow

WAITS = """
    import os, pathlib, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(f"pid_{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launch of two ranks that wait, and all processes of them."""
    scripts.write(tmp_path / "train.py", WAITS)
    with subprocess.Popen(
        [sys.executable, "-m", "nbaccel", "launch", "--cpu", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=scripts.environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while len(texts := [path.read_text() for path in tmp_path.glob("pid_*")]) < 2 or not all(
            texts
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, [int(pid) for text in texts for pid in text.split()]
        process.kill()


@pytest.mark.parametrize(
    ("signal_number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_stops_all_in_order(running, signal_number: int, status: int) -> None:
    process, pids = running
    process.send_signal(signal_number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == status
    assert "all 2 workers have been stopped" in told
    assert not any(map(lives, pids))


def test_no_worker_outlives_a_command_that_is_killed(running) -> None:
    process, pids = running
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))


def test_a_rank_that_is_killed_is_named(running) -> None:
    process, pids = running
    os.kill(pids[0], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "of 2 was killed by SIGKILL" in told
    assert not any(map(lives, pids))
