"""Versions of installed packages, compared."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from packaging.version import Version, parse

from nbaccel.base.errors import ConfigError
from nbaccel.utils.constants import STR_OPERATION_TO_FUNC

__all__ = ["compare_versions", "is_torch_version"]


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Whether a version, or that of an installed package, is as required."""
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(
            f"compare_versions(operation={operation!r}) is unknown: versions cannot be compared. "
            f"Give one of {', '.join(STR_OPERATION_TO_FUNC)}."
        )
    version = library_or_version
    if isinstance(version, str):
        version = parse(importlib.metadata.version(version))
    compare: Any = STR_OPERATION_TO_FUNC[operation]
    return bool(compare(version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch is of such a version; see :func:`compare_versions`."""
    return compare_versions("torch", operation, version)
