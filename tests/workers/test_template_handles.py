"""A template process that is a fork answers as `subprocess.Popen` does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import pytest

from nbaccel.workers.template_handles import DescendantProcess, ForkedProcess


def fork(seconds: float, status: int = 0) -> int:
    child_id = os.fork()
    if child_id == 0:
        time.sleep(seconds)
        os._exit(status)
    return child_id


def test_a_forked_process_that_ends_by_itself() -> None:
    child = ForkedProcess(fork(0.0, status=3))
    assert child.wait(60.0) == 3
    assert child.poll() == 3
    child.kill()  # it has ended, and its number may be another process's


def test_a_forked_process_that_is_killed() -> None:
    child = ForkedProcess(fork(600.0))
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.kill()
    assert child.wait(60.0) == -signal.SIGKILL


def test_a_forked_process_that_other_code_has_waited_for() -> None:
    child = ForkedProcess(fork(0.0))
    os.waitpid(child.pid, 0)
    assert child.wait(60.0) == -signal.SIGKILL


def test_a_descendant_is_over_as_soon_as_it_is_a_zombie() -> None:
    process_id = fork(600.0)
    child = DescendantProcess(process_id, lambda: -signal.SIGTERM)
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    os.kill(process_id, signal.SIGTERM)
    assert child.wait(60.0) == -signal.SIGTERM, "as its parent reports it"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process_id, 0)


def test_a_descendant_that_is_gone_and_unknown_was_killed() -> None:
    process_id = fork(0.0)
    os.waitpid(process_id, 0)
    child = DescendantProcess(process_id, lambda: None)
    child.kill()
    assert child.wait(60.0) == -signal.SIGKILL
