"""No module imports itself by way of others, not even inside a function or for types alone."""

from __future__ import annotations

import pytest

from tests.house import row
from tests.house.source import PACKAGE


@pytest.mark.parametrize("level", ["module", "lazy", "typing"])
def test_imports_make_no_circle(level):
    assert row.cycles(row.read(PACKAGE), level) == []


def test_a_circle_would_be_found(tmp_path):
    """Of each kind: at the top of a module, inside a function, and for types."""
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from made import b\n")
    lazy = "def f():\n    from made.a import x\n"
    (package / "b.py").write_text(lazy)
    modules = row.read(package)
    assert row.cycles(modules, "module") == []
    assert row.cycles(modules, "lazy") == [["made.a", "made.b"]]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.a import x\n"
    (package / "b.py").write_text(typed)
    assert row.cycles(row.read(package), "lazy") == []
    assert row.cycles(row.read(package), "typing") == [["made.a", "made.b"]]
