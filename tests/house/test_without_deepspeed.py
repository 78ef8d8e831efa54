"""Everything but DeepSpeed works where its folder and its row are gone: one backend, one folder."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.programs import run_program

pytestmark = pytest.mark.slow
TESTS = (
    "tests/plan tests/notebook/picker/test_model.py",
    # A launch, and DeepSpeed as one strategy among others.
    "tests/workers/test_rendezvous.py tests/accelerator/test_prepare.py",
)
IMPORTS = """
import importlib, pkgutil, nbaccel
for module in pkgutil.walk_packages(nbaccel.__path__, "nbaccel."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import nbaccel.errors
try:
    nbaccel.advise(None)
except nbaccel.errors.MissingBackend as error:
    print(error)
from nbaccel.utils import DeepSpeedPlugin
DeepSpeedPlugin()
"""


def without_row(source: str) -> str:
    """The capability rows without DeepSpeed's."""
    lines = source.splitlines(keepends=True)
    (row,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "StrategyRow"
        and any(k.arg == "name" and ast.unparse(k.value) == "'deepspeed'" for k in node.keywords)
    )
    return "".join(lines[: row.lineno - 1] + lines[row.end_lineno :])


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("without") / "house"
    ignore = shutil.ignore_patterns("__pycache__", "screenshots")
    for folder in ("nbaccel", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    for folder in ("nbaccel/deepspeed", "tests/deepspeed"):
        shutil.rmtree(copy / folder)
    rows = copy / "nbaccel/config/capabilities.py"
    rows.write_text(without_row(rows.read_text()))
    return copy


def in_house(house: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environ = {**variables, "PYTHONPATH": str(house)}
    return run_program([sys.executable, *words], cwd=house, env=environ, timeout=800, check=False)


def test_every_module_imports_and_asking_for_it_says_what_is_missing(house: Path) -> None:
    done = in_house(house, "-c", IMPORTS)
    assert "advise" in done.stdout, done.stderr
    assert "DeepSpeed" in done.stdout
    assert "left out of this installation" in done.stderr


@pytest.mark.parametrize("tests", TESTS)
def test_its_tests_pass(house: Path, tests: str) -> None:
    # nbval imports for seconds, and there is no notebook.
    quietly = ("-q", "-p", "no:cacheprovider", "-p", "no:nbval", "--slow", "none")
    done = in_house(house, "-m", "pytest", *quietly, *tests.split())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
