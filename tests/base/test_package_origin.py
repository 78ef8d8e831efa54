"""What nbaccel tells people to type names the packages of an extra."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from nbaccel.base import optional_packages
from nbaccel.base.optional_packages import install_line
from tests.isolation import ROOT

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


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts an installed nbaccel in front of ours."""
    folder = tmp_path / "nbaccel-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    install_line.cache_clear()
    yield
    install_line.cache_clear()


def test_the_packages_of_an_extra_are_named() -> None:
    assert install_line("deepspeed") == 'pip install "deepspeed>=0.18.5" ninja'
    assert install_line("fp8") == 'pip install "transformer-engine[pytorch]"'
    assert install_line() == 'pip install "torch>=2.6"'


def test_sources_on_the_path_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(optional_packages.importlib.metadata, "requires", not_installed)
    assert install_line("deepspeed") == f'pip install "{ROOT}[deepspeed]"'
