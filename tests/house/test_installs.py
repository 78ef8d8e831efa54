"""The line that a notebook gives to install what it needs brings everything that it imports."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.isolation import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def brought_by(extras: set[str]) -> set[str]:
    """What an installation with these extras has been asked for, by nbaccel itself."""
    asked = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        asked += [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    names = {canonicalize_name(one.name) for one in asked}
    inner = {extra for one in asked if one.name == "nbaccel" for extra in one.extras}
    return names | (brought_by(inner) if inner else set())


def imported_by(notebook: dict) -> set[str]:
    """Top-level names of the modules that its cells import, in functions and live cells too."""
    found = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        code = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
        try:
            tree = ast.parse(code)
        except SyntaxError:  # a cell that shows what a mistake of syntax looks like
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"nbaccel"}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_an_installation_that_is_enough(path: Path) -> None:
    notebook = json.loads(path.read_text())
    first = "".join(notebook["cells"][0]["source"])
    line = re.search(r"`pip install '\.\[([a-z,]+)\]'`", first)
    assert line, f"{path.name} does not say what to install"
    brought = brought_by(set(line[1].split(",")))
    known = packages_distributions()
    for module in imported_by(notebook):
        names = {canonicalize_name(name) for name in known.get(module, [module])}
        assert names & brought, f"{path.name} imports {module}, which {line[0]} does not bring"
    assert {"ipykernel", "ipython"} <= brought, "a kernel"


def test_notebooks_have_numbers_of_their_own() -> None:
    numbers = [int(path.name.partition("_")[0]) for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers), numbers
