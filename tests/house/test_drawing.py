"""The drawing of the package: what it shows, and what it refuses to draw."""

from __future__ import annotations

import pytest

from docs import drawing
from tests.house import row

LAYERS = [["cli"], ["state", "launchers"], ["plan", "memory"], ["base"]]
FILES = {
    "__init__": "from made import cli\n",
    "cli/__init__": '"""The command.\n\nMore of it.\n"""\nfrom made import plan, state\n',
    "cli/options": "from made.base import env\n",
    "state": "def f():\n    from made.plan import x\n    from made.base import y\n",
    "launchers": "from made import state\n",
    "plan/__init__": "",
    "plan/resolve": "import made.base.env\n" * 60,
    "memory/__init__": "import typing\nif typing.TYPE_CHECKING:\n    import made.base\n",
    "base/__init__": '"""Files."""\n',
    "base/env": "",
}
DRAWN = """\
                files  lines                                              imports *
 3  cli             2   0.0k  The command.                                paths plan
 2  paths           2   0.0k  Import paths of Accelerate's users.         plan
 1  plan            2   0.1k
    memory          1   0.0k
 0  base            2   0.0k  Files.

* and base: each is imported by all that is above it"""


@pytest.fixture
def made(tmp_path):
    """A function that writes a small package, with changed files, and reads it."""

    def write(**changed):
        for name, text in (FILES | changed).items():
            path = tmp_path / "made" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return row.read(tmp_path / "made")

    return write


def test_the_drawing_of_a_small_package(made):
    assert drawing.draw(made(), LAYERS) == DRAWN


def test_the_drawing_fits_a_terminal_of_110_columns():
    assert max(len(line) for line in drawing.drawing().splitlines()) <= 110


def test_long_cells_go_on_in_the_next_line():
    first, second = drawing.rows((1, "plan", 2, "0.1k"), "word " * 10, ["a_folder"] * 5)
    assert first.endswith("a_folder a_folder a_folder a_folder")
    assert second.split() == ["word", "word", "a_folder"]


@pytest.mark.parametrize(
    "import_",
    ["import made.{}", "def f():\n    from made import {}\n", "import os, made.{}"],
)
def test_imports_of_what_is_above_or_beside_are_not_drawn(made, import_):
    for folder in ("cli", "memory"):
        modules = made(**{"plan/__init__": import_.format(folder)})
        with pytest.raises(ValueError, match=rf"made\.plan imports made\.{folder}: .*not below"):
            drawing.draw(modules, LAYERS)


def test_what_has_no_layer_is_named(made):
    modules = made(**{"hosts/__init__": ""})
    with pytest.raises(ValueError, match="hosts"):
        drawing.draw(modules, LAYERS)


def test_a_layer_of_nothing_is_named(made):
    with pytest.raises(ValueError, match="hosts"):
        drawing.draw(made(), [*LAYERS, ["hosts"]])


def test_import_paths_are_drawn_as_one_only_if_they_lie_side_by_side(made):
    with pytest.raises(ValueError, match=r"in between.*paths"):
        drawing.draw(made(), [["cli"], ["launchers"], ["plan"], ["state"], ["memory"], ["base"]])
