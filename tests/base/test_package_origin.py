"""What nbaccel tells people to type was made from where it was installed from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from nbaccel.base import package_origin
from nbaccel.base.package_origin import install_line
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


@pytest.fixture
def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Any] | None], None]]:
    """Puts an installed nbaccel in front of ours, with the record that pip leaves (PEP 610)."""

    def put(origin: dict[str, Any] | None) -> None:
        folder = tmp_path / "site" / "nbaccel-9.9.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA)
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(str(folder.parent))
        assert metadata.version("nbaccel") == "9.9"
        install_line.cache_clear()

    yield put
    install_line.cache_clear()


def test_from_an_index(installed) -> None:
    installed(None)
    assert install_line("deepspeed") == 'pip install "nbaccel[deepspeed]"'
    assert install_line() == "pip install nbaccel"


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_folder(installed, tmp_path: Path, editable: bool) -> None:
    checkout = tmp_path / "my work" / "nbaccel"
    checkout.mkdir(parents=True)
    installed({"url": checkout.as_uri(), "dir_info": {"editable": editable}})
    option = "--editable " if editable else ""
    assert install_line("deepspeed") == f'pip install {option}"{checkout}[deepspeed]"'


def test_from_a_wheel(installed, tmp_path: Path) -> None:
    wheel = tmp_path / "nbaccel-9.9-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_line("fp8") == f'pip install "nbaccel[fp8] @ {wheel.as_uri()}"'
    Requirement(install_line("fp8").split('"')[1])


@pytest.mark.parametrize(
    ("vcs", "revision"),
    [({"requested_revision": "v9"}, "v9"), ({}, "0123abcd")],
)
def test_from_a_repository(installed, vcs: dict[str, str], revision: str) -> None:
    url = "https://example.org/nbaccel.git"
    installed({"url": url, "vcs_info": {"vcs": "git", "commit_id": "0123abcd", **vcs}})
    assert install_line("deepspeed") == f'pip install "nbaccel[deepspeed] @ git+{url}@{revision}"'
    assert Requirement(install_line("deepspeed").split('"')[1]).extras == {"deepspeed"}


def test_where_the_folder_is_gone_the_packages_are_named(installed, tmp_path: Path) -> None:
    installed({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert install_line("deepspeed") == 'pip install "deepspeed>=0.18.5" ninja'
    assert install_line("fp8") == 'pip install "transformer-engine[pytorch]"'


def test_sources_on_the_path_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package_origin.metadata, "distribution", not_installed)
    install_line.cache_clear()
    assert install_line("deepspeed") == f'pip install "{ROOT}[deepspeed]"'
    install_line.cache_clear()


@pytest.mark.slow
def test_pip_takes_the_line_of_this_environment() -> None:
    *_, place = install_line("deepspeed").split()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
    done = subprocess.run(
        [*command, place.strip('"')], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "Would install nbaccel" in done.stdout
