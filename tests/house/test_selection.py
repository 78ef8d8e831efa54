"""What `make quick CHANGED=1` and CI add to the quick tests, in a repository made for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import selection

FILES = [
    *("nbaccel/base/units.py", "nbaccel/calls/launch.py", "nbaccel/deepspeed/advise.py"),
    *("nbaccel/state.py", "tests/test_state.py"),
    *("tests/base/test_units.py", "tests/calls/test_run.py", "tests/calls/sources.py"),
    *("tests/deepspeed/advisor/test_advise.py", "tests/conftest.py", "notebooks/01.ipynb"),
    "README.md",
]
MIRRORED = {
    "nbaccel/base/units.py": "tests/base",
    "nbaccel/state.py": "tests/test_state.py",
    "nbaccel/calls/launch.py": "tests/calls",
    "nbaccel/deepspeed/advise.py": "tests/deepspeed",
    "tests/calls/test_run.py": "tests/calls/test_run.py",
    "tests/calls/sources.py": "tests/calls",
    "tests/conftest.py": None,
    "notebooks/01.ipynb": "notebooks/01.ipynb",
    "README.md": None,
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# as it landed\n")
    run = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "landed"]):
        subprocess.run([*run, *command], check=True, env=environ)
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setattr(selection, "LANDINGS", tmp_path / "landings")
    landed = selection.git("rev-parse", "HEAD")
    (tmp_path / "landings").write_text(
        f"# oldest first\n{'0' * 40} 2026-01-01\n{landed} 2026-01-02\n"
    )
    selection.changed.cache_clear()
    yield tmp_path
    selection.changed.cache_clear()


@pytest.mark.parametrize("name", MIRRORED)
def test_a_changed_file_asks_for_the_tests_that_mirror_it(repository, name):
    (repository / name).write_text("# changed\n")
    mirrored = MIRRORED[name]
    assert selection.changed() == (frozenset({mirrored}) if mirrored else frozenset())


def test_a_change_asks_for_those_that_look_from_outside_too(repository):
    (repository / "tests/kernel").mkdir()
    (repository / "nbaccel/calls/launch.py").write_text("# changed\n")
    assert selection.changed() == {"tests/calls", "tests/kernel"}


def test_a_new_file_has_changed(repository):
    (repository / "nbaccel/calls/new.py").touch()
    assert "tests/calls" in selection.changed()


def test_where_the_last_landing_is_unknown_everything_has_changed(repository):
    (repository / "landings").write_text(f"{'0' * 40} 2026-01-01\n")
    assert selection.changed() == {"tests"}


def test_the_landings_of_this_repository_are_in_its_history():
    if selection.git("rev-parse", "HEAD") is None:
        pytest.skip("not a git checkout")
    noted = selection.landings()
    assert noted
    assert [
        one for one in noted if selection.git("merge-base", "--is-ancestor", one, "HEAD") != ""
    ] == []


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
