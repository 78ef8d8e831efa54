"""sdist and wheel, built from the checkout; and that each has what it should have, and no more."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.isolation import ROOT
from tests.lanes.environment import Environment

__all__ = ["Builds", "build", "faults"]

TOOLS = ("build", "twine")


class Builds:
    """What was built."""

    def __init__(self, folder: Path) -> None:
        (self.sdist,) = folder.glob("*.tar.gz")
        (self.wheel,) = folder.glob("*.whl")

    def unpack_tests(self, folder: Path) -> Path:
        """Unpack the sdist without the package itself, so that tests find the installed one."""
        with tarfile.open(self.sdist) as archive:
            kept = [one for one in archive.getmembers() if one.name.split("/")[1] != "nbaccel"]
            archive.extractall(folder, kept)
        (unpacked,) = folder.iterdir()
        return unpacked


def build(folder: Path, tools: Environment) -> Builds:
    """Build both, the wheel from the sdist, and have twine look at them."""
    python = [tools.python, "-m"]
    subprocess.run([*python, "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    builds = Builds(folder)
    checked = [*python, "twine", "check", "--strict", builds.sdist, builds.wheel]
    subprocess.run(checked, check=True, stdout=sys.stderr)
    return builds


def faults(builds: Builds) -> list[str]:
    """What is missing in them, and what should not be there."""
    wheel = set(zipfile.ZipFile(builds.wheel).namelist())
    with tarfile.open(builds.sdist) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nbaccel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    strange = {name for name in wheel if not name.split("/")[0].startswith(("nbaccel", "nbaccel-"))}
    beside = {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "constraints/cpu.txt"}
    return [
        *(f"not in the wheel: {name}" for name in sorted(wanted - wheel)),
        *(f"in the wheel, and no part of nbaccel: {name}" for name in sorted(strange)),
        *(f"not in the sdist: {name}" for name in sorted((wanted | beside) - sdist)),
    ]
