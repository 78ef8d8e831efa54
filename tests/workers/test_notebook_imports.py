"""Which modules are installed packages', and which are the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nbaccel.workers import template
from nbaccel.workers.template import by_package


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """A module beside the notebook, and one that `pip install --target` has put somewhere."""
    folders = {"nb_beside": tmp_path / "beside", "nb_targeted": tmp_path / "target"}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / f"{name}.py").write_text("VERSION = 1\n")
        monkeypatch.syspath_prepend(str(folder))
    (folders["nb_targeted"] / "nb_targeted-1.0.dist-info").mkdir()
    template._is_installed.cache_clear()
    for name in folders:
        importlib.import_module(name)
    yield {name: folder / f"{name}.py" for name, folder in folders.items()}
    for name in folders:
        del sys.modules[name]


def test_installed_packages_and_own_modules_are_told_apart_and_in_order(imported):
    installed, local = template.installed_modules(), template.local_modules()
    assert {"torch", "torch.nn.functional", "numpy", "nb_targeted"} <= set(installed)
    assert all((torch, np))
    assert {"nb_beside", __name__} <= local
    assert not {"json", "os", "asyncio", "zmq", "ipykernel"} & set(installed)
    assert not {"json", "os", "torch"} & local
    assert "nbaccel.calls.launch" not in installed, "only the notebook launches"

    files = dict.fromkeys(["outer", "outer.part", "inner", "outer.late", "inner.part"], "")
    assert list(by_package(files).items()) == [
        ("inner", ("inner", "inner.part")),
        ("outer", ("outer", "outer.part", "outer.late")),
    ]
