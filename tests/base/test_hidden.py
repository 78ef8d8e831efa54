"""A file of the user's with the name of a module that nbaccel needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.base import hidden
from tests.house.source import ROOT


def errors_of(program: str, folder: Path) -> str:
    """What a script in a folder, which is the first that it imports from, writes to stderr."""
    script = folder / "script.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    return done.stderr


@pytest.mark.parametrize("name", ["notebook_launcher", "Pool", "RunConfig"])
@pytest.mark.parametrize(("module", "called"), [("torch", "PyTorch"), ("numpy", "NumPy")])
def test_an_import_names_the_file_that_hides_a_package(tmp_path, name, module, called):
    file = tmp_path / f"{module}.py"
    file.write_text("")
    said = errors_of(f"import {module}\nfrom nbaccel import {name}\n", tmp_path)
    assert f"nbaccel.errors.MissingBackend: {module} is {file}, which hides {called}" in said
    assert "rename that file" in said


def test_a_folder_hides_a_package_as_a_file_does(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    said = errors_of("import torch\nimport nbaccel\nnbaccel.Pool\n", tmp_path)
    assert f"MissingBackend: torch is {tmp_path / 'torch'}, which hides PyTorch" in said


def test_an_import_that_finds_the_file_itself_keeps_the_cause(tmp_path):
    (tmp_path / "torch.py").write_text("")
    said = errors_of("from nbaccel import Pool\n", tmp_path)
    assert "'torch' is not a package" in said
    assert f"MissingBackend: torch is {tmp_path / 'torch.py'}, which hides PyTorch" in said


def test_a_launch_names_a_file_that_was_imported_after_nbaccel(tmp_path):
    (tmp_path / "torch.py").write_text("")
    for workers in (1, 2):
        said = errors_of(
            f"from nbaccel import notebook_launcher\nimport torch\n"
            f"if __name__ == '__main__': notebook_launcher(print, num_processes={workers})\n",
            tmp_path,
        )
        assert f"MissingBackend: torch is {tmp_path / 'torch.py'}, which hides PyTorch" in said


def test_a_file_that_hides_a_module_of_python_is_named(tmp_path):
    (tmp_path / "random.py").write_text("")
    said = errors_of("import random\nfrom nbaccel import Pool\n", tmp_path)
    assert f"MissingBackend: random is {tmp_path / 'random.py'}, which hides Python's own" in said


def test_an_attribute_that_is_missing_while_nbaccel_is_imported_is_told(tmp_path):
    said = errors_of("import signal\ndel signal.SIGINT\nfrom nbaccel import Pool\n", tmp_path)
    assert "ImportError: nbaccel.Pool cannot be imported: " in said
    assert "AttributeError: module 'signal' has no attribute 'SIGINT'" in said


def test_what_setuptools_puts_in_place_of_a_module_of_python_hides_nothing(tmp_path):
    code = "import setuptools, distutils, signal\ndel signal.SIGINT\nfrom nbaccel import Pool\n"
    said = errors_of(code, tmp_path)
    assert "ImportError: nbaccel.Pool cannot be imported: " in said


def test_the_real_ones_are_not_refused():
    import numpy as np
    import torch

    assert (torch.ones(1).numpy() == np.ones(1)).all()
    hidden.refuse_hidden_modules()
    with hidden.explain_import_errors("anything"):
        pass
    with pytest.raises(ImportError, match=r"nbaccel\.anything cannot be imported: no such thing"):
        with hidden.explain_import_errors("anything"):
            raise AttributeError("no such thing")
