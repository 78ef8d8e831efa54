"""Where this nbaccel was installed from, and so the line that installs more of it."""

from __future__ import annotations

import json
import shlex
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["install_line"]

_PROJECT = Path(__file__).resolve().parent.parent


@lru_cache
def install_line(extra: str = "") -> str:
    """What to type to install what an extra of nbaccel names.

    An installer records where a package came from in ``direct_url.json`` (PEP 610); without it the
    package came from an index. Where that place is gone, the packages themselves are named.

    Args:
        extra: The extra; empty for nbaccel itself.

    Returns:
        A line for a terminal.
    """
    wanted = f"[{extra}]" if extra else ""
    try:
        installed = metadata.distribution("nbaccel")
    except metadata.PackageNotFoundError:  # a folder of sources on Python's path
        is_checkout = (_PROJECT / "pyproject.toml").is_file()
        return _pip(f"{_PROJECT}{wanted}") if is_checkout else _pip(f"nbaccel{wanted}")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin:
        return _pip(f"nbaccel{wanted}")
    url = urlsplit(origin["url"])
    place = Path(url2pathname(url.path)) if url.scheme == "file" else None
    if place is not None and not place.exists():
        return _pip(*(_needed(installed, extra) or [f"nbaccel{wanted}"]))
    if place is not None and "dir_info" in origin:
        editable = ["--editable"] if origin["dir_info"].get("editable") else []
        return _pip(*editable, f"{place}{wanted}")
    return _pip(f"nbaccel{wanted} @ {_pip_url(origin)}")


def _pip_url(origin: dict[str, Any]) -> str:
    """The URL as pip takes it, with version control and commit."""
    if (vcs := origin.get("vcs_info")) is None:
        return str(origin["url"])
    revision = vcs.get("requested_revision") or vcs["commit_id"]
    return f"{vcs['vcs']}+{origin['url']}@{revision}"


def _needed(installed: metadata.Distribution, extra: str) -> list[str]:
    """The packages of an extra that this Python would be given."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in installed.requires or ()]
    return [
        str(one).partition(";")[0].strip()
        for one in requirements
        if one.marker is not None
        and one.marker.evaluate({"extra": extra})
        and not one.marker.evaluate({"extra": ""})
    ]


def _pip(*arguments: str) -> str:
    return " ".join(["pip install", *(_quoted(argument) for argument in arguments)])


def _quoted(argument: str) -> str:
    """In double quotes, which every shell and `%pip` understand, where something asks for them."""
    if shlex.quote(argument) == argument:
        return argument
    return f'"{argument}"'
