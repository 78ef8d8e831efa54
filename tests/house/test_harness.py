"""A test that fails once and passes alone makes no run red, and is told; all else does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rerun_alone
from tests.isolation import ROOT

FAILS_ONCE = """
import pathlib
def test_once():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
FAILS_ONCE_AT_ITS_END = """
import pathlib, pytest
@pytest.fixture
def spoilt():
    yield
    mark = pathlib.Path(__file__).with_suffix(".mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
def test_end(spoilt):
    assert True
"""
FAILS = "def test_always():\n    assert 1 == 2\n"
SKIPS_THEN = FAILS_ONCE.replace(
    "    assert", "    import pytest\n    was_there and pytest.skip()\n    assert"
)
PASSES = "def test_well():\n    assert True\n"


def run_pytest(folder: Path, *options: str, **sources: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    plugins = ["-pno:nbval", "-ptests.rerun_alone", "-pno:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--numprocesses=2"]], ids=["one process", "two"])
def test_what_passes_alone_is_told_and_fails_no_run(tmp_path, options):
    done = run_pytest(tmp_path, *options, once=FAILS_ONCE, end=FAILS_ONCE_AT_ITS_END, well=PASSES)
    assert done.returncode == 0, done.stdout
    *_, first, second, closing = done.stdout.splitlines()
    told = {
        f"unsteady: test_{name}.py::test_{name} (add it to tests/unsteady.md)"
        for name in ("once", "end")
    }
    assert {first, second} == told
    assert re.search(r"2 passed, 2 unsteady", closing)
    assert "assert was_there" in done.stdout
    assert set((tmp_path / rerun_alone.FOUND).read_text().splitlines()) == told


@pytest.mark.slow
def test_what_fails_again_fails_the_run(tmp_path):
    done = run_pytest(tmp_path, once=FAILS_ONCE, always=FAILS)
    assert done.returncode == 1
    assert re.search(r"1 failed, 1 unsteady", done.stdout)
    assert "again, alone: test_always.py::test_always\n  failed again" in done.stdout


@pytest.mark.slow
def test_a_skip_is_no_pass(tmp_path):
    assert run_pytest(tmp_path, once=SKIPS_THEN).returncode == 1


def test_many_failures_are_not_run_again(tmp_path):
    sources = {f"file{i}": FAILS_ONCE for i in range(rerun_alone.MOST_TESTS + 1)}
    done = run_pytest(tmp_path, **sources)
    assert done.returncode == 1
    assert "again, alone" not in done.stdout


def test_a_file_that_cannot_be_read_is_not_run_again(tmp_path):
    done = run_pytest(tmp_path, broken="import nothing_of_this_name\n")
    assert done.returncode == 2
    assert "again, alone" not in done.stdout


def test_no_test_is_listed_twice():
    listed = re.findall(r"^\| `([^`]+)`", rerun_alone.LIST.read_text(), flags=re.MULTILINE)
    assert len(listed) == len(set(listed)), "mend or delete what is unsteady for the second time"
