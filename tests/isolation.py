"""Run one test's body in a fresh Python process, and bring failure, skip and output home.

    @isolated(timeout_s=30)
    def test_fork_after_matmul(tmp_path): ...

            pytest's process                      the fresh process
            ----------------                      -----------------
    fixtures and parameters  --- request file --->  imports the test's module
    waits, at most timeout_s                        runs the plain body
    raises, skips or passes  <-- outcome file ----  writes what became of it
    shows it as captured     <-- output file -----  whatever it printed, C level too

For tests that would spoil their process: fork after OpenMP, an open CUDA context, a crash.
Fixtures and parameters are pickled, so a test asks for plain ones (`tmp_path`, numbers, strings).
The same warnings are errors there as here. A body that hangs shows its stacks before it is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Request:
    """What the fresh process is asked to do."""

    module: str
    qualname: str
    arguments: dict[str, Any]
    filters: list[tuple[Any, ...]]
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of it; `text` is the reason of a skip or the traceback of a failure."""

    kind: Literal["passed", "failed", "skipped"]
    text: str = ""


def isolated(body: Callable[..., None] | None = None, *, timeout_s: float = 800) -> Any:
    """Make a test run in a process of its own; plain `@isolated` or `@isolated(timeout_s=...)`."""
    if body is None:
        return functools.partial(isolated, timeout_s=timeout_s)

    @functools.wraps(body)
    def in_a_fresh_process(*_self: object, **arguments: Any) -> None:
        __tracebackhide__ = True  # a method's object stays here: the fresh process makes its own
        request = Request(
            body.__module__, body.__qualname__, arguments, list(warnings.filters), timeout_s
        )
        _raise_here(_run(request))

    return in_a_fresh_process


def _raise_here(outcome: Outcome) -> None:
    __tracebackhide__ = True
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)


def _run(request: Request) -> Outcome:
    """Start the fresh process, wait for it, and read what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(request))
        # A file, not a pipe: a grandchild that keeps it open cannot make us wait for ever.
        with (folder / "output").open("wb") as output:
            status = _start_and_wait(folder, output, request.timeout_s)
        sys.stdout.write((folder / "output").read_text(errors="replace"))
        return _judge(status, folder / "outcome", request.timeout_s)


def _start_and_wait(folder: Path, output: Any, timeout_s: float) -> int | None:
    """Return the exit status, or None when the time was up."""
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "tests.isolation", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": search_path},
        start_new_session=True,  # a group of its own, so that it can be ended whole
    )
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _judge(status: int | None, outcome_file: Path, timeout_s: float) -> Outcome:
    if status is None:
        return Outcome("failed", f"not done after {timeout_s:g} s; its stacks are in the output")
    outcome = pickle.loads(outcome_file.read_bytes()) if outcome_file.exists() else None
    if status == 0 and outcome is not None:
        return outcome
    end = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    when = "before the test was over" if outcome is None else f"after the test had {outcome.kind}"
    more = f"\n{outcome.text}" if outcome is not None else ""
    return Outcome("failed", f"the fresh process ended with {end}, {when}{more}")


# ---------------------------------------------------------------- in the fresh process
def _main(folder: Path) -> None:
    request: Request = pickle.loads((folder / "request").read_bytes())
    faulthandler.dump_traceback_later(request.timeout_s * 0.9)
    outcome = _attempt(request)
    faulthandler.cancel_dump_traceback_later()
    (folder / "outcome").write_bytes(pickle.dumps(outcome))


def _attempt(request: Request) -> Outcome:
    try:
        _install(request.filters)
        _find_body(request)(**request.arguments)
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip.msg))
    except BaseException as error:  # whatever it is, it is the test's outcome
        return Outcome("failed", "".join(traceback.format_exception(error)))
    return Outcome("passed")


def _install(filters: list[tuple[Any, ...]]) -> None:
    """Put the pytest process's warning filters in force; the last installed is asked first."""
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        patterns = [getattr(p, "pattern", p) or "" for p in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], lineno)


def _find_body(request: Request) -> Callable[..., None]:
    """Import the test's module here; return the undecorated function, bound if it is a method."""
    found: Any = importlib.import_module(request.module)
    for name in request.qualname.split("."):
        owner, found = found, getattr(found, name)
    body: Callable[..., None] = inspect.unwrap(found)
    return functools.partial(body, owner()) if inspect.isclass(owner) else body


if __name__ == "__main__":
    # Through the module's importable name, so that the pickled records are of one class.
    importlib.import_module("tests.isolation")._main(Path(sys.argv[1]))
