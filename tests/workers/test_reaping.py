"""Processes that a worker has started end with it, wherever they have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

from nbaccel import Pool, WorkerDied, notebook_launcher
from tests.kernel.kernel import wait_for


@pytest.fixture
def token() -> Iterator[str]:
    """A number of seconds to sleep that no other process has; what is left is ended."""
    found = f"3{uuid.uuid4().int % 10**8}"
    yield found
    for process in sleeping(found):
        process.kill()


def sleeping(token: str) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter()
        if _command(p)[-1:] == [token] and p.status() != psutil.STATUS_ZOMBIE
    ]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def in_a_group(token: str) -> None:
    subprocess.Popen(["sleep", token], process_group=0)


def in_a_session(token: str) -> None:
    subprocess.Popen(["sleep", token], start_new_session=True)


def as_a_daemon(token: str) -> None:
    code = (
        "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        "os.execvp('sleep', ['sleep', sys.argv[1]])"
    )
    subprocess.run([sys.executable, "-c", code, token], check=True)


WAYS = [in_a_group, in_a_session, as_a_daemon]


def start_and(end: str, way: Callable[[str], None], token: str) -> None:
    """What a rank does: start a process, then end in some way."""
    way(token)
    while not sleeping(token):
        time.sleep(0.01)
    if end == "raise":
        raise ValueError("after the start")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["return", "raise", "die"])
def test_what_left_its_group_ends_with_the_launch(
    token: str, way: Callable[[str], None], end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if end == "return":
        notebook_launcher(start_and, (end, way, token), num_processes=2)
        told = capfd.readouterr()
        assert f"sleep {token} (process" in told.out + told.err
        assert "ended what this rank had started and left running" in told.out + told.err
    else:
        with pytest.raises(ValueError if end == "raise" else WorkerDied):
            notebook_launcher(start_and, (end, way, token), num_processes=2)
    assert not sleeping(token)


@pytest.mark.forks
def test_a_fork_of_the_notebook_ends_its_own(token: str) -> None:
    notebook_launcher(
        start_and, ("return", as_a_daemon, token), num_processes=2, start_method="fork"
    )
    assert not sleeping(token)


def test_live_workers_keep_what_they_started_until_they_end(token: str) -> None:
    with Pool(1, namespace={}) as pool:
        pool.call(as_a_daemon, token)
        assert wait_for(lambda: sleeping(token))
        pool.run("still = 1")
        assert sleeping(token)
    assert not sleeping(token)
