"""Tests that fork from pytest's own process get one that can be forked.

What another test, or a library that it imported, has done with CUDA stays done in pytest's process,
and nbaccel rightly refuses to fork it. Then, and only then, such a test runs in a pytest of its
own, with its fixtures. It is known by a parameter `fork`, or by the marker `forks`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nbaccel.devices.cuda import driver_in_use
from tests.isolation import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

# There a test runs as it is: a file that wakes CUDA when it is imported would start ever more.
IS_APART = "NBACCEL_TEST_APART"
OF_THIS_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")


def run_forks_apart(items: Iterable[pytest.Item]) -> None:
    """Have each test that forks look, when its turn comes, whether this process can be forked."""
    if IS_APART in os.environ:
        return
    for item in items:
        if isinstance(item, pytest.Function) and _forks(item):
            _look_first(item)


def _forks(item: pytest.Function) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    # A parameter may be a tensor, which equals no word.
    by_parameter = any(isinstance(given, str) and given == "fork" for given in parameters)
    return by_parameter or item.get_closest_marker("forks") is not None


def _look_first(item: pytest.Function) -> None:
    set_up_here = item.setup

    def set_up() -> None:
        if driver_in_use():
            item.runtest = lambda: _run_apart(item.nodeid)  # type: ignore[method-assign]
        else:
            set_up_here()

    item.setup = set_up  # type: ignore[method-assign]


def _run_apart(nodeid: str) -> None:
    __tracebackhide__ = True
    environ = {name: text for name, text in os.environ.items() if name not in OF_THIS_PYTEST}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", nodeid],
        cwd=ROOT,
        env={**environ, IS_APART: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        pytest.fail(f"in a process of its own:\n{done.stdout}", pytrace=False)
    if " skipped" in done.stdout.splitlines()[-1]:
        pytest.skip(f"in a process of its own:\n{done.stdout}")
