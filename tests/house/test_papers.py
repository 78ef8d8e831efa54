"""The papers agree with the package: versions, code in the README, no trace of one machine."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

import nbaccel
from tests.house.source import ROOT, tracked_files

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def declared_version() -> str:
    """The version in pyproject.toml (tomllib came with Python 3.11; one line needs no parser)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.+)"$', text, flags=re.MULTILINE)[1]


def test_the_readme_shows_code():
    assert BLOCKS


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_in_the_readme_compiles(number):
    compile(BLOCKS[number], f"README.md, block {number}", "exec")


def test_the_package_is_the_version_it_declares():
    assert nbaccel.__version__ == declared_version()


def test_the_changelog_opens_with_the_declared_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)[1]
    assert newest == declared_version()


def test_what_is_installed_is_this_version():
    try:
        installed = importlib.metadata.version("nbaccel")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from the source tree: nbaccel is not installed")
    assert installed == declared_version()


# The brackets keep this line from being its own finding.
MACHINE_PATH = re.compile(r"(?<![\w.$}~])/(?:[w]ork|[r]oot|opt/[w]heels)(?=/|\b)")


def test_no_file_names_a_path_of_one_machine():
    files = tracked_files()
    if files is None:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_search_for_machine_paths_sees_what_it_should():
    assert MACHINE_PATH.search("cd " + "/" + "work/main")
    assert MACHINE_PATH.search("HOME=/" + "root")
    assert not MACHINE_PATH.search("nbaccel/launch/worker.py and src/" + "work/x")
