"""A plugin that writes each test's result at once: a machine may be gone before pytest ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

RESULTS = "NBACCEL_GPU_RESULTS"
"""The environment variable that names the file."""


def pytest_configure(config: pytest.Config) -> None:
    # Of pytest-xdist's processes the one that hears of all.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultWriter(Path(os.environ[RESULTS])))


class ResultWriter:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for a test that was run, or for what kept it from that; why it failed below."""
        if report.when != "call" and report.passed:
            return
        lines = [f"{report.outcome} {report.duration:.1f} s {report.nodeid}"]
        if not report.passed:
            # Of a skip: file, line, reason.
            told = (
                report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
            )
            lines += [f"    {line}" for line in told.splitlines()]
        with self._path.open("a") as file:
            file.write("\n".join(lines) + "\n")
