"""The structure's figures: no circles of imports, of modules or of folders."""

from __future__ import annotations

import pytest

from tests.house import row


@pytest.mark.parametrize("level", ["module", "lazy", "typing"])
def test_imports_make_no_circle(level):
    assert row.cycles(row.nbaccel(), level) == []


@pytest.mark.parametrize("level", ["module", "lazy", "typing"])
def test_folders_make_no_circle(level):
    assert row.folder_cycles(row.nbaccel(), level) == []


def test_a_class_has_a_name_of_its_own():
    places = row.defined(row.nbaccel())
    several = [name for name, where in places.items() if len(where) > 1]
    assert [name for name in several if name.lstrip("_")[0].isupper() and not name.isupper()] == []


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


def test_a_circle_of_folders_would_be_found(tmp_path):
    """Where no two modules import each other, too."""
    package = tmp_path / "made"
    for name, text in {
        "one/a.py": "from made.two import b\n",
        "one/c.py": "",
        "two/b.py": "",
        "two/d.py": "from made.one.c import x\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
        (package / name).with_name("__init__.py").touch()
    (package / "__init__.py").touch()
    assert row.cycles(row.read(package), "typing") == []
    assert row.folder_cycles(row.read(package), "typing") == [["one", "two"]]
