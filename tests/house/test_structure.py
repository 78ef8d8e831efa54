"""The structure's figures: no circles of imports, names that say something and mean one thing."""

from __future__ import annotations

import pytest

from tests.house import row
from tests.house.source import PACKAGE


@pytest.mark.parametrize("level", ["module", "lazy", "typing"])
def test_imports_make_no_circle(level):
    assert row.cycles(row.read(PACKAGE), level) == []


def test_names_mean_one_thing():
    places = row.defined(row.read(PACKAGE))
    several = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert len(several) < 0.02 * len(places), several
    assert [name for name in several if name.lstrip("_")[0].isupper() and not name.isupper()] == []


def test_names_have_words():
    names = row.identifiers(row.read(PACKAGE))
    given = sum(names.values())
    assert sum((len(row.words(n)) or 1) * count for n, count in names.items()) >= 1.5 * given


def test_the_table_has_a_row_for_each_figure():
    """ARCHITECTURE's; its numbers are those of a day, and its rows those of the script."""
    architecture = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    figures = row.measure(row.read(PACKAGE))
    assert [name for name in figures if f"| {name} |" not in architecture] == []


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
