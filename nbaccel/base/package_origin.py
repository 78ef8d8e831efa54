"""The line that installs the packages which an extra of nbaccel names."""

from __future__ import annotations

import shlex
from functools import lru_cache
from importlib import metadata
from pathlib import Path

_PROJECT_FOLDER = Path(__file__).resolve().parents[2]


@lru_cache
def install_line(extra: str = "") -> str:
    """What to type to install what an extra of nbaccel names.

    The packages themselves: nbaccel may be on no index, and `pip install "nbaccel[deepspeed]"` then
    ends in "No matching distribution found", as a reader of the guides has met.
    """
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires("nbaccel") or ()]
    # Not installed: a folder of sources on Python's path.
    except metadata.PackageNotFoundError:
        return f'pip install "{_PROJECT_FOLDER}{f"[{extra}]" if extra else ""}"'
    packages = []
    for requirement in requirements:
        marker, requirement.marker = requirement.marker, None
        is_base = marker is None or marker.evaluate({"extra": ""})
        if is_base != bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            # In double quotes, which every shell and `%pip` understand, where quotes are needed.
            name = str(requirement)
            packages.append(name if shlex.quote(name) == name else f'"{name}"')
    return " ".join(["pip install", *packages])
