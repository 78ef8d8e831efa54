"""A Jupyter server with JupyterLab and Notebook 7, which keeps all its files in one folder.

    test ── http ──► server ──► kernels ──► template, workers

One server has both: they are two applications on the same kernels, and a start costs seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil

from tests.isolation import ROOT

TOKEN = "tests"
START_S = 300.0
ANSWER_S = 200.0
PAGES = {"lab": "doc/tree", "notebook": "notebooks", "classic": "notebooks"}
"""Where each application shows a notebook alone."""

# No question to the outside: news, updates of JupyterLab, lists of extensions.
OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--ServerApp.terminals_enabled=False",
    "--LabApp.expose_app_in_browser=True",
    "--LabApp.extension_manager=readonly",
    # A peer of the extra `bench`, which puts itself between kernels and pages.
    "--ServerApp.jpserver_extensions=jupyter_distributed=False",
    "--JupyterNotebookApp.expose_app_in_browser=True",
    f"--IdentityProvider.token={TOKEN}",
)
# Notebook 6, the generation of Colab's and Kaggle's packages.
CLASSIC_OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ip=127.0.0.1",
    "--NotebookApp.port_retries=0",
    f"--NotebookApp.token={TOKEN}",
)
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    }
}


class Server:
    """It runs until `close`."""

    def __init__(self, *, classic: bool = False) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="nb-server-")
        home = Path(self._home.name)
        self.folder = home / "notebooks"
        self.folder.mkdir()
        self._log = home / "log.txt"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}/"
        for plugin, values in SETTINGS.items():
            path = home / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        options = (
            ["notebook", *CLASSIC_OPTIONS, f"--port={port}", f"--notebook-dir={self.folder}"]
            if classic
            else [
                *("jupyterlab", *OPTIONS, f"--ServerApp.port={port}"),
                f"--ServerApp.root_dir={self.folder}",
            ]
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *options],
                cwd=self.folder,
                env=_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait()

    @property
    def log(self) -> str:
        """What it has written to its terminal."""
        return self._log.read_text(errors="replace")

    def write(self, name: str, cells: Sequence[str | nbformat.NotebookNode]) -> Path:
        """Put a notebook into its folder."""
        notebook = nbformat.v4.new_notebook(
            cells=[
                nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells
            ],
            metadata={
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
            },
        )
        path = self.folder / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def address(self, application: str, name: str) -> str:
        """Where an application shows a notebook."""
        return f"{self.url}{PAGES[application]}/{name}.ipynb?token={TOKEN}&reset"

    def end_kernel(self, name: str) -> None:
        """End the kernel of a notebook, and what it has started."""
        for session in self._ask("sessions"):
            if session["path"] == f"{name}.ipynb":
                started = self._started_by(session["kernel"]["id"])
                self._ask(f"sessions/{session['id']}", method="DELETE")
                _end(started)

    def close(self) -> None:
        """End it, and its kernels."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _end(started)
        self._home.cleanup()

    def _started_by(self, kernel: str) -> list[psutil.Process]:
        """The process of a kernel, and its descendants."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if kernel in " ".join(process.cmdline()):
                    return [process, *process.children(recursive=True)]
        return []

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._ask("status")
            except (urllib.error.URLError, ConnectionError):
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    self._process.kill()
                    raise RuntimeError(f"the server does not answer:\n{self.log}") from None
                time.sleep(0.05)
            else:
                return

    def _ask(self, what: str, *, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {TOKEN}"}
        request = urllib.request.Request(f"{self.url}api/{what}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes that are ending, and kill those that are not."""
    _, alive = psutil.wait_procs(processes, timeout=100)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=100)


def _environment(home: Path) -> dict[str, str]:
    """Everything that Jupyter, IPython and their user have of their own lies below one folder."""
    places = {
        "HOME": "home",
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    for place in places.values():
        (home / place).mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        **{name: str(home / place) for name, place in places.items()},
        "PYTHONPATH": path,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
