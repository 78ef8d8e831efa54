"""A local module that was edited and not reloaded runs in two versions: that is told."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nbaccel import Pool, notebook_launcher

EDITED = "nb_helper_under_edit.py has been edited since the notebook imported"
"""Of this module: files of the tests may have been edited, too."""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module beside the notebook, with its bytecode file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "nb_helper_under_edit.py").write_text("def version():\n    return 'v1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("nb_helper_under_edit")
    del sys.modules["nb_helper_under_edit"]


def edit(module: ModuleType) -> None:
    """Another text of another length: Python's time stamp counts whole seconds only."""
    time.sleep(0.02)  # times of files count in milliseconds
    Path(str(module.__file__)).write_text("def version():\n    return 'version 2'\n")


def test_an_edited_module_is_told_once_with_the_remedy(helper, capsys):
    for number in range(3):
        if number == 1:
            edit(helper)
        expected = "version 2" if number else "v1"
        assert list(notebook_launcher(helper.version, num_processes=2)) == [expected] * 2
        told = capsys.readouterr().err
        assert (EDITED in told) == (number == 1)
        assert ("importlib.reload(nb_helper_under_edit)" in told) == (number == 1)


@pytest.mark.parametrize("writes_bytecode", [True, False])
def test_a_reload_is_the_end_of_it(helper, writes_bytecode, monkeypatch, capsys):
    """Images of containers have bytecode files, and PYTHONDONTWRITEBYTECODE."""
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes_bytecode)
    edit(helper)
    importlib.reload(helper)
    assert list(notebook_launcher(helper.version, num_processes=2)) == ["version 2"] * 2
    assert EDITED not in capsys.readouterr().err


def test_a_cell_that_gets_something_of_it_tells_it_too(helper, capsys):
    with Pool(1, namespace={"version": helper.version}) as pool:
        edit(helper)
        pool.run("found = version()")
        assert "has been edited since" in capsys.readouterr().err
        assert pool.pull("found") == {"found": ["version 2"]}
