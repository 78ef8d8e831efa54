"""Optional packages: looked up without importing them, imported when chosen and not before."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shlex
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from nbaccel.base.errors import MissingBackend

_VERSION_FIELD = re.compile(r"^version:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import a module that only some users need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        text = f"{why} needs {module}: {name} is not installed. Install it: {install_line(extra)}"
        if is_installed(name):
            text = (
                f"{why} needs {module}, which is installed but cannot be imported: {error}. "
                f"Its version may not fit the rest. Reinstall it: {install_line(extra)}"
            )
        raise MissingBackend(text, name=module) from error


def is_installed(module_name: str) -> bool:
    """Whether a module could be imported, found out without running any of its code."""
    if module_name in sys.modules:
        # An entry of None makes Python refuse the import.
        return sys.modules[module_name] is not None
    top_package, *submodule_names = module_name.split(".")
    module_spec = find_spec(top_package)
    # find_spec("a.b") would import `a`; walking the search locations does not.
    for submodule_name in submodule_names:
        places = None if module_spec is None else module_spec.submodule_search_locations
        if module_spec is None or places is None:
            return False
        module_spec = PathFinder.find_spec(f"{module_spec.name}.{submodule_name}", places)
    return module_spec is not None


def installed_version(distribution_name: str) -> str:
    """The version of what is installed under a name, without importing it."""
    try:
        return metadata_version(importlib.metadata.distribution(distribution_name))
    except importlib.metadata.PackageNotFoundError:
        return ""


def metadata_version(distribution: importlib.metadata.Distribution) -> str:
    """The version of a distribution, without parsing all of its metadata (milliseconds)."""
    # Of wheels, of eggs, and of distributions that are a single file: as importlib.metadata.
    for name in ("METADATA", "PKG-INFO", ""):
        text = (distribution.read_text(name) or "").partition("\n\n")[0]
        if field := _VERSION_FIELD.search(text):
            return field[1]
    return ""


@lru_cache
def install_line(extra: str = "") -> str:
    """What to type to install what an extra of nbaccel names, which may be on no index itself."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("nbaccel") or ()]
    # Not installed: a folder of sources on Python's path.
    except importlib.metadata.PackageNotFoundError:
        folder = Path(__file__).resolve().parents[2]
        return f'pip install "{folder}{f"[{extra}]" if extra else ""}"'
    packages = []
    for requirement in requirements:
        marker, requirement.marker = requirement.marker, None
        is_base = marker is None or marker.evaluate({"extra": ""})
        if is_base != bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            # In double quotes, which every shell and `%pip` understand, where quotes are needed.
            name = str(requirement)
            packages.append(name if shlex.quote(name) == name else f'"{name}"')
    return " ".join(["pip install", *packages])
