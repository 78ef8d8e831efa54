"""What the tests are run with: reruns, the choice of tests, processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rerun_alone, selection
from tests.isolation import ROOT, isolated
from tests.programs import run_program

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
PASSES = "def test_well():\n    assert True\n"


def run_pytest(folder: Path, *options: str, **sources: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    plugins = ["-pno:nbval", "-ptests.rerun_alone", "-pno:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    return run_program(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)


@pytest.mark.slow
def test_what_passes_alone_is_told_and_fails_no_run(tmp_path):
    sources = {"once": FAILS_ONCE, "end": FAILS_ONCE_AT_ITS_END, "well": PASSES}
    done = run_pytest(tmp_path, "--numprocesses=2", **sources)
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


def test_many_failures_are_not_run_again(tmp_path):
    sources = {f"file{i}": FAILS_ONCE for i in range(rerun_alone.MOST_TESTS + 1)}
    done = run_pytest(tmp_path, **sources)
    assert done.returncode == 1
    assert "again, alone" not in done.stdout


def test_no_test_is_listed_twice_and_landings_are_in_the_history():
    listed = re.findall(r"^\| `([^`]+)`", rerun_alone.LIST.read_text(), flags=re.MULTILINE)
    assert len(listed) == len(set(listed)), "mend or delete what is unsteady for the second time"
    if selection.git("rev-parse", "HEAD") is None:
        pytest.skip("not a git checkout")
    noted = selection.landings()
    assert noted
    assert [
        one for one in noted if selection.git("merge-base", "--is-ancestor", one, "HEAD") != ""
    ] == []


@pytest.mark.parametrize(
    ("changed", "mirrored"),
    [
        ("nbaccel/base/units.py", {"tests/base"}),
        ("nbaccel/state.py", {"tests/test_state.py"}),
        ("nbaccel/calls/launch.py", {"tests/calls", "tests/kernel", "tests/stress"}),
        ("tests/calls/test_launch.py", {"tests/calls/test_launch.py"}),
        ("tests/cli/scripts.py", {"tests/cli"}),
        ("tests/conftest.py", set()),
        ("notebooks/01_quickstart.ipynb", {"notebooks/01_quickstart.ipynb"}),
        ("README.md", set()),
        (None, {"tests"}),  # where the last landing is unknown
    ],
)
def test_a_changed_file_asks_for_the_tests_that_mirror_it(monkeypatch, changed, mirrored):
    says = {"rev-parse": "new", "merge-base": "old", "diff": changed}
    monkeypatch.setattr(selection, "git", lambda word, *_: says.get(word) if changed else None)
    selection.changed.cache_clear()
    assert selection.changed() == mirrored
    selection.changed.cache_clear()


def test_slow_tests_that_would_begin_too_late_are_skipped_and_named(pytester):
    pytester.makeconftest(
        """
        from tests.selection import add_option as pytest_addoption
        from tests.selection import skip_if_late as pytest_runtest_setup
        """
    )
    pytester.makepyfile(
        """
        import pytest

        def test_quick(): ...

        @pytest.mark.slow
        def test_slow(): ...
        """
    )
    done = pytester.runpytest_subprocess("-rs", "--slow-until", "0")
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["*no time is left for it*"])
    pytester.runpytest_subprocess("--slow-until", "9e9").assert_outcomes(passed=2)


@pytest.fixture
def outer_pid():
    return os.getpid()


@isolated
def test_the_body_runs_in_another_process_with_the_fixtures_values(tmp_path, outer_pid):
    assert Path(tmp_path).is_dir()
    assert os.getppid() == outer_pid
    assert "pytest" not in Path("/proc/self/cmdline").read_bytes().decode()
