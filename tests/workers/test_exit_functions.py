"""The end of a worker: what libraries do then is done, and what it has started ends with it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbaccel import Pool, WorkerDied, notebook_launcher
from nbaccel.workers import time_limits
from tests.kernel.kernel import wait_for

STARTS = pytest.mark.parametrize("start_method", ["template", "fork"])


@STARTS
def test_what_is_done_at_exit_by_python_and_its_libraries_is_done(start_method, tmp_path, capfd):
    import logging.handlers

    def use(fails: bool) -> str:
        rank = os.environ["RANK"]
        # As trackers do: rows in memory, written at the end, and a service of their own.
        service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

        def write() -> None:
            time.sleep(0.5)
            Path(tmp_path, f"rows_{rank}").write_text("row\n" * 200)
            service.terminate()
            service.wait()

        atexit.register(write)
        if fails:
            raise ValueError("after the rows")
        file = logging.FileHandler(tmp_path / f"log_{rank}")
        logging.getLogger("mine").addHandler(logging.handlers.MemoryHandler(1000, target=file))
        logging.getLogger("mine").warning("kept in memory")
        use.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: (time.sleep(0.3), Path(tmp_path, f"pool_{rank}").touch()))
        late = lambda: (time.sleep(0.3), Path(tmp_path, f"thread_{rank}").touch())  # noqa: E731
        threading.Thread(target=late).start()
        return str(use.folder.name)  # type: ignore[attr-defined]

    folders = notebook_launcher(use, (False,), 2, start_method=start_method)
    assert not [folder for folder in folders if Path(folder).exists()]
    for rank in range(2):
        assert len((tmp_path / f"rows_{rank}").read_text().splitlines()) == 200
        assert "kept in memory" in (tmp_path / f"log_{rank}").read_text()
        assert (tmp_path / f"pool_{rank}").exists()
        assert (tmp_path / f"thread_{rank}").exists()
    # The service was ended by who had started it.
    assert "left running" not in "".join(capfd.readouterr())
    (tmp_path / "rows_0").unlink()
    with pytest.raises(ValueError, match="after the rows"):
        notebook_launcher(use, (True,), 1, start_method=start_method)
    assert (tmp_path / "rows_0").exists()


@pytest.mark.forks
def test_what_the_notebook_does_at_exit_is_not_done_by_its_workers(tmp_path):
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


def test_it_is_given_up_in_time_and_told(monkeypatch, capfd):
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


@pytest.fixture
def token() -> Iterator[str]:
    """A number of seconds to sleep that no other process has; what is left is ended."""
    found = f"3{uuid.uuid4().int % 10**8}"
    yield found
    for process in sleeping(found):
        process.kill()


def sleeping(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [token] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def as_a_daemon(token: str) -> None:
    code = (
        "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        "os.execvp('sleep', ['sleep', sys.argv[1]])"
    )
    subprocess.run([sys.executable, "-c", code, token], check=True)


def start_and(end: str, way: str, token: str) -> None:
    """What a rank does: start a process, then end in some way."""
    if way == "daemon":
        as_a_daemon(token)
    else:
        options: dict[str, Any] = {"group": {"process_group": 0}}
        subprocess.Popen(["sleep", token], **options.get(way, {"start_new_session": True}))
    while not sleeping(token):
        time.sleep(0.01)
    if end == "raise":
        raise ValueError("after the start")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "way"),
    [
        *itertools.product(("return", "raise", "die"), ("group", "session", "daemon")),
        pytest.param("fork", "daemon", marks=pytest.mark.forks),
    ],
)
def test_what_left_its_group_ends_with_the_launch(token, way, end, capfd):
    method = "fork" if end == "fork" else "template"
    launch = partial(notebook_launcher, start_and, (end, way, token), 2, start_method=method)
    if end in ("return", "fork"):
        launch()
        told = "".join(capfd.readouterr())
        assert f"sleep {token} (process" in told
        assert "ended what this rank had started and left running" in told
    else:
        with pytest.raises(ValueError if end == "raise" else WorkerDied):
            launch()
    assert not sleeping(token)


def test_live_workers_keep_what_they_started_until_they_end(token, tmp_path):
    code = (
        "import atexit, os, pathlib\n"
        f"_ = atexit.register(pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch)"
    )
    with Pool(1, namespace={}) as pool:
        pool.call(as_a_daemon, token)
        assert wait_for(lambda: sleeping(token))
        pool.run(code)
        assert sleeping(token)
        assert not list(tmp_path.iterdir())
    assert not sleeping(token)
    assert [path.name for path in tmp_path.iterdir()] == ["0"], "done when they are stopped"
