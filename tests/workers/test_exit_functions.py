"""The end of a worker: what libraries do then is done, and what it has started ends with it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbaccel import Pool, WorkerDied, notebook_launcher
from nbaccel.workers import time_limits
from tests.kernel.kernel import wait_for

STARTS = pytest.mark.parametrize("start_method", ["template", "fork"])


def note_at_exit(folder: str) -> str:
    """As trackers do: rows in memory, written when the process ends, and a service of their own."""
    rank = os.environ["RANK"]
    service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rows = [f"row {i}" for i in range(200)]

    def write() -> None:
        time.sleep(0.5)
        Path(folder, f"rows_{rank}").write_text("\n".join(rows))
        service.terminate()
        service.wait()

    atexit.register(write)
    return rank


@STARTS
def test_rows_that_are_written_at_exit_are_there(
    start_method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = notebook_launcher(note_at_exit, (str(tmp_path),), 2, start_method=start_method)
    assert list(ranks) == ["0", "1"]
    for rank in ranks:
        assert len((tmp_path / f"rows_{rank}").read_text().splitlines()) == 200
    # The service was ended by who had started it.
    assert "left running" not in "".join(capfd.readouterr())


def test_a_function_that_fails_has_its_rows_too(tmp_path: Path) -> None:
    def fail() -> None:
        atexit.register(Path(tmp_path, f"rank_{os.environ['RANK']}").touch)
        raise ValueError("after the rows")

    with pytest.raises(ValueError, match="after the rows"):
        notebook_launcher(fail, (), 1, start_method="template")
    with pytest.raises(ValueError, match="after the rows"):
        notebook_launcher(fail, (), 2)
    assert list(tmp_path.iterdir())


def test_live_workers_have_theirs_when_they_are_stopped(tmp_path: Path) -> None:
    code = (
        "import atexit, os, pathlib\n"
        f"_ = atexit.register(pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch)"
    )
    with Pool(2) as pool:
        pool.run(code)
        assert not list(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@STARTS
def test_threads_files_and_folders_are_ended_as_by_python(
    start_method: str, tmp_path: Path
) -> None:
    def use() -> str:
        rank = os.environ["RANK"]
        handler = logging.handlers.MemoryHandler(
            1000, target=logging.FileHandler(tmp_path / f"log_{rank}")
        )
        logging.getLogger("mine").addHandler(handler)
        logging.getLogger("mine").warning("kept in memory")
        use.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: (time.sleep(0.3), Path(tmp_path, f"pool_{rank}").touch()))
        late = lambda: (time.sleep(0.3), Path(tmp_path, f"thread_{rank}").touch())  # noqa: E731
        threading.Thread(target=late).start()
        return str(use.folder.name)  # type: ignore[attr-defined]

    import logging.handlers

    folders = notebook_launcher(use, (), 2, start_method=start_method)
    assert not [folder for folder in folders if Path(folder).exists()]
    for rank in range(2):
        assert "kept in memory" in (tmp_path / f"log_{rank}").read_text()
        assert (tmp_path / f"pool_{rank}").exists()
        assert (tmp_path / f"thread_{rank}").exists()


@pytest.mark.forks
def test_what_the_notebook_does_at_exit_is_not_done_by_its_workers(tmp_path: Path) -> None:
    class Owner:
        pass

    owner = Owner()
    finalizer = weakref.finalize(owner, (tmp_path / "finalized").touch)
    atexit.register((tmp_path / "called").touch)
    try:
        with tempfile.TemporaryDirectory() as folder:
            notebook_launcher(os.getpid, (), 2, start_method="fork")
            assert Path(folder).exists()
        assert not list(tmp_path.iterdir())
    finally:
        finalizer.detach()
        atexit.unregister((tmp_path / "called").touch)


def test_it_is_given_up_in_time_and_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_limits, "EXIT_S", 0.5)

    def hang() -> int:
        atexit.register(time.sleep, 600)
        return 7

    # A fork has the shorter limit; a template would import its own.
    found: Any = notebook_launcher(hang, (), 2, start_method="fork")
    assert list(found) == [7, 7]
    shown = "".join(capfd.readouterr())
    assert "took more than 0.5 s" in shown
    assert "End trackers and writers in the function itself" in shown


# ------------------------- processes that a worker has started end with it, wherever they have gone


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
