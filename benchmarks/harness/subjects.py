"""Who is measured, and how a kernel is made ready for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness.namespace import HERE, Remote

CELLS = HERE / "cells"
PEER = "accelerate"


@dataclass(frozen=True)
class Subject:
    """One way to launch.

    Attributes:
        name: As in the table.
        cell: The text that defines `launch(body, args, num_processes)`.
        module: What must be importable.
        call: The same launch as a user would write it in a cell, so that a traceback through it
            has no frame of the harness. `BODY` and `FOLDER` are filled in.
        start_method: For ours.
    """

    name: str
    cell: str
    module: str
    call: str
    start_method: str = ""

    def call_of(self, body: str, folder: str) -> str:
        """A cell of one line."""
        call = self.call.replace("METHOD", repr(self.start_method))
        return call.replace("BODY", body).replace("FOLDER", repr(folder))

    @property
    def is_ours(self) -> bool:
        return self.module == "nbaccel"

    @property
    def is_installed(self) -> bool:
        """Whether it could be imported. Nothing is: that could start processes in the harness."""
        spec = find_spec(self.module)
        places = spec.submodule_search_locations if spec else None
        if not places:
            return False
        return not self.is_ours or any(Path(place, "launchers.py").exists() for place in places)


_OURS = "notebook_launcher(worker(BODY), (FOLDER,), 2, start_method=METHOD)"
_FABRIC = (
    'Fabric(accelerator="cpu", devices=2, strategy="ddp_notebook").launch(worker(BODY), FOLDER)'
)
_FORK = 'mp.start_processes(enter, (BODY, 2, free_port(), (FOLDER,)), 2, start_method="fork")'
_SPAWN = (
    "port = bench_module.free_port()\n"
    "arguments = (bench_module.BODY, 2, port, (FOLDER,))\n"
    'mp.start_processes(bench_module.enter, arguments, 2, start_method="spawn")'
)
SUBJECTS = (
    Subject("nbaccel-template", "nbaccel_cell.py", "nbaccel", _OURS, "auto"),
    Subject("nbaccel-fork", "nbaccel_cell.py", "nbaccel", _OURS, "fork"),
    Subject(
        "accelerate",
        "accelerate_cell.py",
        "accelerate",
        "notebook_launcher(worker(BODY), (FOLDER,), num_processes=2)",
    ),
    Subject("fabric", "fabric_cell.py", "lightning", _FABRIC),
    Subject("mp-fork", "mp_fork_cell.py", "torch", _FORK),
    Subject("mp-spawn", "mp_spawn_cell.py", "torch", _SPAWN),
)


def bodies() -> str:
    return (CELLS / "bodies.py").read_text()


def launcher_cell(subject: Subject) -> str:
    """The cell that brings the subject in, with its start method if it is ours."""
    code = (CELLS / subject.cell).read_text()
    if subject.is_ours:
        code = code.replace('"auto"', repr(subject.start_method))
    return code


def write_module(remote: Remote) -> str:
    """For spawn: the bodies as a module, and the line that makes it importable."""
    folder = remote.new_folder()
    enter = (CELLS / "mp_fork_cell.py").read_text().replace("from __future__", "# from __future__")
    Path(folder, "bench_module.py").write_text(bodies() + "\n" + enter)
    return f"import sys; sys.path.insert(0, {folder!r})\n"


def bring_in(remote: Remote, subject: Subject) -> None:
    path = write_module(remote) if subject.name == "mp-spawn" else ""
    remote.must_run(path + launcher_cell(subject))


@contextmanager
def kernel_for(subject: Subject, *, is_used: bool = False, settle: bool = True) -> Iterator[Remote]:
    """A kernel with the bodies and the subject in it, at rest."""
    with Remote() as remote:
        remote.must_run(bodies())
        if is_used:
            remote.must_run("work_in_kernel()")
        bring_in(remote, subject)
        if settle:
            remote.settle()
        yield remote
