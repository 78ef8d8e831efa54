"""Which modules are installed packages', which are the user's own, and what has changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nbaccel.workers import installed_modules
from nbaccel.workers.installed_modules import by_package, stamps_of

OLD, NEW = "VERSION = 1\n", "VERSION = 2222\n"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """A module beside the notebook, and one that `pip install --target` has put somewhere."""
    folders = {"nb_beside": tmp_path / "beside", "nb_targeted": tmp_path / "target"}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / f"{name}.py").write_text(OLD)
        monkeypatch.syspath_prepend(str(folder))
    (folders["nb_targeted"] / "nb_targeted-1.0.dist-info").mkdir()
    installed_modules._is_installed.cache_clear()
    for name in folders:
        importlib.import_module(name)
    yield {name: folder / f"{name}.py" for name, folder in folders.items()}
    for name in folders:
        del sys.modules[name]


def test_installed_packages_and_own_modules_are_told_apart(imported: dict[str, Path]) -> None:
    installed, local = installed_modules.installed_modules(), installed_modules.local_modules()
    assert {"torch", "torch.nn.functional", "numpy", "nb_targeted"} <= set(installed)
    assert all((torch, np))
    assert {"nb_beside", __name__} <= local
    assert not {"json", "os", "asyncio", "zmq", "ipykernel"} & set(installed)
    assert not {"json", "os", "torch"} & local
    assert "nbaccel.calls.launch" not in installed, "only the notebook launches"


def test_a_package_comes_before_those_that_import_it() -> None:
    files = dict.fromkeys(["outer", "outer.part", "inner", "outer.late", "inner.part"], "")
    assert list(by_package(files).items()) == [
        ("inner", ("inner", "inner.part")),
        ("outer", ("outer", "outer.part", "outer.late")),
    ]


def test_a_changed_and_a_lost_file_are_seen(imported: dict[str, Path]) -> None:
    path = imported["nb_targeted"]
    before = stamps_of({"nb_targeted": str(path)})
    assert stamps_of({"nb_targeted": str(path)}) == before
    path.write_text(NEW)
    assert stamps_of({"nb_targeted": str(path)}) != before
    path.unlink()
    assert stamps_of({"nb_targeted": str(path)}) == {"nb_targeted": None}
