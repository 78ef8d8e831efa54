"""Tests that fork from pytest's own process get one that can be forked.

What another test, or a library that it imported, has done with CUDA stays done in pytest's
process, and nbaccel rightly refuses to fork it. Then, and only then, such tests run in a pytest of
their own, those of a file together, with their fixtures. They are known by a parameter `fork`, or
by the marker `forks`.

        pytest's process                            a pytest of its own
        ----------------                            -------------------
    the first of a file that forks  -- nodeids -->  runs all of the file that fork
    each takes what became of it   <-- a file ----  a line for each
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbaccel.devices.cuda import driver_in_use
from tests.isolation import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

OUTCOMES = "NBACCEL_TEST_APART"
"""Names the file for outcomes. Where it is set tests run as they are: if the file wakes CUDA when
it is imported, there would be no end."""
OF_THIS_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")


@dataclass(frozen=True)
class Apart:
    """What became of a file's tests."""

    outcomes: dict[str, tuple[str, str]]
    """Nodeid → outcome and its reason."""
    output: str


def run_forks_apart(items: Iterable[pytest.Item]) -> None:
    """Have each test that forks look, when its turn comes, whether this process can be forked."""
    if OUTCOMES in os.environ:
        return
    for item in items:
        if _forks(item):
            _look_first(item)


def _forks(item: pytest.Item) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    # A parameter may be a tensor, which equals no word.
    by_parameter = any(isinstance(given, str) and given == "fork" for given in parameters)
    return by_parameter or item.get_closest_marker("forks") is not None


def _look_first(item: pytest.Item) -> None:
    set_up_here = item.setup

    def set_up() -> None:
        if driver_in_use():
            item.runtest = lambda: _take_outcome(item)  # type: ignore[method-assign]
        else:
            set_up_here()

    item.setup = set_up  # type: ignore[method-assign]


def _take_outcome(item: pytest.Item) -> None:
    __tracebackhide__ = True
    together = (each for each in item.session.items if each.path == item.path and _forks(each))
    apart = _run(tuple(each.nodeid for each in together))
    outcome, reason = apart.outcomes.get(item.nodeid, ("failed", apart.output))
    if outcome == "failed":
        pytest.fail(f"in a process of its own:\n{reason}", pytrace=False)
    if outcome == "skipped":
        pytest.skip(reason)


@functools.cache
def _run(nodeids: tuple[str, ...]) -> Apart:
    """Run tests of one file in a pytest of their own."""
    environ = {name: text for name, text in os.environ.items() if name not in OF_THIS_PYTEST}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        file.touch()
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.apart"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodeids],
            cwd=ROOT,
            env={**environ, OUTCOMES: str(file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        outcomes: dict[str, tuple[str, str]] = {}
        for nodeid, outcome, reason in map(json.loads, file.read_text().splitlines()):
            # What went wrong in the teardown comes last.
            outcomes[nodeid] = (outcome, reason)
    return Apart(outcomes, done.stdout)


# ---------------------------------------------------------------- the plugin of the other pytest
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say what became of a test, as soon as it is known: a crash may follow."""
    if report.when != "call" and report.passed:
        return
    # Of a skip: file, line, reason.
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, reason]) + "\n")
