from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from nbaccel.base import optional_packages
from nbaccel.base.optional_packages import install_line, is_installed, metadata_version, require
from nbaccel.errors import MissingBackend
from tests.isolation import ROOT


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A path with a package that works, one that fails to import, and a nested one."""
    (tmp_path / "nb_broken.py").write_text("import nb_not_there_at_all\n")
    inner = tmp_path / "nb_outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "nb_outer" / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (inner / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (inner / "leaf.py").write_text("raise RuntimeError('was run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_missing_or_broken_one_is_told_with_the_line_to_type(packages):
    with pytest.raises(MissingBackend) as caught:
        require("nb_not_there_at_all", extra="deepspeed", why="ZeRO")
    message = str(caught.value)
    assert message.endswith(f"Install it: {install_line('deepspeed')}")
    assert "ZeRO needs nb_not_there_at_all" in message
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.name == "nb_not_there_at_all"
    with pytest.raises(MissingBackend, match=r"installed but cannot be imported.*nb_not_there"):
        require("nb_broken", extra="fp8", why="FP8")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nb_outer", True),
        ("nb_outer.inner", True),
        ("nb_outer.inner.leaf", True),
        ("nb_outer.inner.missing", False),
        ("nb_outer.inner.leaf.below", False),
        ("nb_not_there_at_all", False),
        ("nb_not_there_at_all.x", False),
    ],
)
def test_looking_runs_no_code(packages, name, expected):
    assert is_installed(name) is expected
    assert "nb_outer" not in sys.modules


def test_versions_are_those_of_importlib(tmp_path):
    # By distribution, not by name: setuptools brings others of the same names along.
    distributions = list(importlib.metadata.distributions())
    assert distributions
    assert [*map(metadata_version, distributions)] == [
        distribution.version for distribution in distributions
    ]
    (tmp_path / "half-1.0.dist-info").mkdir()
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert metadata_version(distribution) == ""


METADATA = """Metadata-Version: 2.4
Name: nbaccel
Version: 9.9
Provides-Extra: deepspeed
Provides-Extra: fp8
Requires-Dist: torch>=2.6
Requires-Dist: deepspeed>=0.18.5; extra == "deepspeed"
Requires-Dist: ninja; extra == "deepspeed"
Requires-Dist: transformer-engine[pytorch]; extra == "fp8"
Requires-Dist: not-for-us; (python_version < "3") and extra == "fp8"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts an installed nbaccel in front of ours."""
    folder = tmp_path / "nbaccel-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    install_line.cache_clear()
    yield
    install_line.cache_clear()


@pytest.mark.usefixtures("installed")
def test_the_packages_of_an_extra_are_named_or_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_line("deepspeed") == 'pip install "deepspeed>=0.18.5" ninja'
    assert install_line("fp8") == 'pip install "transformer-engine[pytorch]"'
    assert install_line() == 'pip install "torch>=2.6"'
    install_line.cache_clear()

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(optional_packages.importlib.metadata, "requires", not_installed)
    assert install_line("deepspeed") == f'pip install "{ROOT}[deepspeed]"'
