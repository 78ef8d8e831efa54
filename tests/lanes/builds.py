"""sdist and wheel, built from the checkout; and that each has what it should have, and no more."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.isolation import ROOT
from tests.lanes.environment import Environment

TOOLS = ("build", "twine")


def build(folder: Path, tools: Environment) -> tuple[Path, Path]:
    """Build sdist and wheel, the wheel from the sdist, and have twine look at them."""
    python = [tools.python, "-m"]
    subprocess.run([*python, "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    checked = [*python, "twine", "check", "--strict", sdist, wheel]
    subprocess.run(checked, check=True, stdout=sys.stderr)
    return sdist, wheel


def unpack_tests(sdist: Path, folder: Path) -> None:
    """Unpack the sdist without the package itself, so that tests find the installed one."""
    with tarfile.open(sdist) as archive:
        kept = [one for one in archive.getmembers() if one.name.split("/")[1] != "nbaccel"]
        archive.extractall(folder, kept)


def faults(sdist: Path, wheel: Path) -> list[str]:
    """What is missing in them, and what should not be there."""
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nbaccel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    strange = {name for name in in_wheel if not name.startswith("nbaccel")}
    beside = {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "constraints/cpu.txt"}
    return [
        *(f"not in the wheel: {name}" for name in sorted(wanted - in_wheel)),
        *(f"in the wheel, and no part of nbaccel: {name}" for name in sorted(strange)),
        *(f"not in the sdist: {name}" for name in sorted((wanted | beside) - in_sdist)),
    ]
