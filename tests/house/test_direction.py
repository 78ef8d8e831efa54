"""Imports go down only, and the low floors stay light."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.house.source import ROOT, package_files

FLOORS_WITH_BACKENDS = ("nbaccel/devices/", "nbaccel/_catalog")
LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def test_the_floors_hold():
    linter = subprocess.run(
        [sys.executable, "-c", LINTER, "--no-cache", "--no-logo"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert linter.returncode == 0, linter.stdout + linter.stderr


# What is asked by name instead of through a contract; `mixed_precision == "no"` is data, not one.
BY_NAME = re.compile(
    r"\b(backend|strategy|device_type|device_kind)\b\s*(==|!=|\bin\b|\bis\b)\s*[\"'(\[{]"
)


def test_no_backend_is_told_by_its_name_above_its_floor():
    found = [
        f"{file.name}:{number}: {line.strip()}"
        for file in package_files()
        if not file.name.startswith(FLOORS_WITH_BACKENDS)
        for number, line in enumerate(file.lines, start=1)
        if BY_NAME.search(line.partition("#")[0])
    ]
    assert not found, "ask the capabilities row or the contract instead:\n" + "\n".join(found)


def test_the_grep_sees_what_it_should():
    assert BY_NAME.search('if strategy == "ddp":')
    assert BY_NAME.search('elif plan.backend in ("nccl", "gloo"):')
    assert not BY_NAME.search("self.strategy = strategy")
    assert not BY_NAME.search("for strategy in strategies:")


# Whom `from accelerate.utils import ...` served must only change the import.
PEERS_NAMES = "nbaccel/utils/"
NOWHERE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def test_every_file_has_a_name_that_says_what_is_in_it():
    found = [f.name for f in package_files() if NOWHERE_NAMES & set(f.path.with_suffix("").parts)]
    found = [name for name in found if not name.startswith(PEERS_NAMES)]
    assert not found, f"a file is named for what it holds, not 'utils': {found}"
