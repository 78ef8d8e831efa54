"""Environments of the lanes, made with uv: what it has fetched it links, and copies nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.isolation import ROOT

__all__ = ["HOME", "Environment", "MissingPackages", "MissingPython", "check_shared", "interpreter"]

HOME = ROOT / ".lanes"
"""Where environments lie while their lanes run."""
# What uv says when an index does not have a package, or cannot be reached.
_NOT_FOUND_TEXTS = ("not found in the package registry", "No solution found", "Failed to fetch")
# What pip is told about packages, uv has to be told by its own variables.
_UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


class MissingPython(Exception):
    """This machine has no Python of the version that a lane runs with."""


class MissingPackages(Exception):
    """The index of this machine does not have what a lane needs."""


def check_shared(python: str) -> None:
    """Check that a Python has a library that others can load: torch_xla does."""
    asked = "import sys, sysconfig; sys.exit(not sysconfig.get_config_var('Py_ENABLE_SHARED'))"
    if subprocess.run([python, "-c", asked], check=False).returncode:
        raise MissingPython(f"{python} has no shared libpython, which its packages load")


def interpreter(version: str) -> str:
    """A Python of this version on this machine."""
    found = shutil.which(f"python{version}")
    # pyenv has a command for each version that it knows of, and some of them only fail.
    if found and not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode:
        return found
    # Its versions lie beside these commands, or where it is installed by default.
    roots = [Path(found).parents[1], Path.home() / ".pyenv"] if found else [Path.home() / ".pyenv"]
    for root in roots:
        if of_pyenv := sorted(root.glob(f"versions/{version}.*/bin/python")):
            return str(of_pyenv[-1])
    raise MissingPython(f"there is no python{version} on the PATH")


class Environment:
    """A virtual environment of one lane."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def create(self, version: str, *, with_pip: bool = False) -> None:
        """Make it anew, with nothing in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        seed = ["--seed"] if with_pip else []
        python = interpreter(version)
        _uv("venv", *seed, "--no-project", "--python", python, str(self.folder))

    def install(self, *packages: str | Path) -> None:
        """Install packages, or options that name them."""
        _uv("pip", "install", "--python", str(self.python), *map(str, packages))

    def install_if_there(self, *packages: str | Path) -> None:
        """Install packages that an index may not have."""
        try:
            self.install(*packages)
        except RuntimeError as error:
            if any(text in str(error) for text in _NOT_FOUND_TEXTS):
                said = " ".join(str(error).partition("\n")[2].split())
                raise MissingPackages(f"the index does not have its packages: {said}") from error
            raise

    def site_packages(self) -> Path:
        """Where its packages are."""
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder

    def frozen(self) -> dict[str, str]:
        """What is installed: versions by name."""
        command = ("pip", "list", "--python", str(self.python), "--format", "json")
        return {item["name"]: item["version"] for item in json.loads(_uv(*command))}

    def warm(self) -> None:
        """Compile what all tests import, once, and not in several processes at the same time."""
        code = "import torch, torch._dynamo, torch.distributed.fsdp, IPython, ipykernel.ipkernel"
        subprocess.run([self.python, "-c", code], check=True, capture_output=True)

    def run(
        self, *arguments: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] | None = None
    ) -> int:
        """Run its Python; returns the exit status."""
        environ = {**os.environ, **(variables or {})}
        return subprocess.run(
            [self.python, *arguments], cwd=cwd, env=environ, check=False
        ).returncode

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _uv(*arguments: str) -> str:
    done = subprocess.run(
        [_program(), *arguments], env=_environ(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"uv {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout


@cache
def _program() -> str:
    """uv: the machine's own, or one installed for the lanes."""
    if found := shutil.which("uv"):
        return found
    folder = HOME / "uv"
    if not (folder / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


@cache
def _environ() -> dict[str, str]:
    """This process's environment, and in it what pip has been told of where packages are."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    environ = {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "180", **os.environ}
    environ.pop("VIRTUAL_ENV", None)
    for line in told.splitlines():  # global.index-url='https://...', :env:.cert='/...'
        key, _, value = line.partition("=")
        if variable := _UV_VARIABLES.get(key.rpartition(".")[2]):
            environ.setdefault(variable, value.strip("'\""))
    return environ
