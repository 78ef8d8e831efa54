from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import pytest

from nbaccel.base.optional_packages import install_line
from nbaccel.errors import MissingBackend
from nbaccel.utils import imports
from nbaccel.utils.imports import _is_there, _required
from tests.isolation import ROOT

accelerate_imports = pytest.importorskip("accelerate.utils.imports")
# Accelerate's answer is None where a folder of the name lies about, and False else.
ASKED = [name for name in imports.__all__ if name.startswith("is_")]


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_accelerates(name: str) -> None:
    assert getattr(imports, name)() is bool(getattr(accelerate_imports, name)())


@pytest.mark.slow
def test_nothing_heavy_is_imported_to_find_out() -> None:
    code = (
        "import sys\nfrom nbaccel.utils import imports\n"
        f"[getattr(imports, name)() for name in {ASKED!r}]\nprint(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert not {"deepspeed", "transformers", "pandas", "datasets", "wandb"} & {*loaded.split()}


def test_a_version_that_will_not_do_counts_as_missing_which_is_said_before_it_begins() -> None:
    found = importlib.metadata.version("pytest")
    assert _is_there("pytest", versions=f">={found}")
    assert not _is_there("pytest", versions=f"<{found}")

    def convert() -> str:
        return "done"

    assert _required(convert, lambda: True, "torchao", "fp8")() == "done"
    with pytest.raises(
        MissingBackend, match="convert needs torchao.*" + re.escape(install_line("fp8"))
    ):
        _required(convert, lambda: False, "torchao", "fp8")()
