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

_PROJECT_FOLDER = Path(__file__).resolve().parents[2]


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
    extra_suffix = f"[{extra}]" if extra else ""
    try:
        distribution = metadata.distribution("nbaccel")
    # Not installed: a folder of sources on Python's path.
    except metadata.PackageNotFoundError:
        is_checkout = (_PROJECT_FOLDER / "pyproject.toml").is_file()
        return (
            _pip_line(f"{_PROJECT_FOLDER}{extra_suffix}")
            if is_checkout
            else _pip_line(f"nbaccel{extra_suffix}")
        )
    direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not direct_url:
        return _pip_line(f"nbaccel{extra_suffix}")
    split_url = urlsplit(direct_url["url"])
    source_path = Path(url2pathname(split_url.path)) if split_url.scheme == "file" else None
    if source_path is not None and not source_path.exists():
        return _pip_line(*(_extra_requirements(distribution, extra) or [f"nbaccel{extra_suffix}"]))
    if source_path is not None and "dir_info" in direct_url:
        editable_option = ["--editable"] if direct_url["dir_info"].get("editable") else []
        return _pip_line(*editable_option, f"{source_path}{extra_suffix}")
    return _pip_line(f"nbaccel{extra_suffix} @ {_pip_url(direct_url)}")


def _pip_url(direct_url: dict[str, Any]) -> str:
    """The URL as pip takes it, with version control and commit."""
    if (vcs_info := direct_url.get("vcs_info")) is None:
        return str(direct_url["url"])
    revision = vcs_info.get("requested_revision") or vcs_info["commit_id"]
    return f"{vcs_info['vcs']}+{direct_url['url']}@{revision}"


def _extra_requirements(distribution: metadata.Distribution, extra: str) -> list[str]:
    """The packages of an extra that this Python would be given."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in distribution.requires or ()]
    return [
        str(requirement).partition(";")[0].strip()
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        # Leaves out what is required without the extra as well.
        and not requirement.marker.evaluate({"extra": ""})
    ]


def _pip_line(*arguments: str) -> str:
    return " ".join(["pip install", *(_shell_quoted(argument) for argument in arguments)])


def _shell_quoted(argument: str) -> str:
    """In double quotes, which every shell and `%pip` understand, where quotes are needed."""
    if shlex.quote(argument) == argument:
        return argument
    return f'"{argument}"'
