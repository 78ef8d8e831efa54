"""What has to be the same on all hosts, because processes there exchange pickles and tensors."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version

__all__ = ["own_versions", "version_mismatch"]


def own_versions() -> dict[str, str]:
    """Versions of this machine, by what has them."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # Without the build (`+cu130`): the same model trains on CPUs here and on GPUs there.
        "torch": version("torch").partition("+")[0],
        # The package itself may not be imported from below.
        "nbaccel": sys.modules["nbaccel"].__version__,
    }


def version_mismatch(other_versions: Mapping[str, str]) -> str:
    """Why a host with these versions cannot take part; empty if it can."""
    differences = [
        f"{name} {other_versions.get(name, 'missing')} there and {own_version} here"
        for name, own_version in own_versions().items()
        if other_versions.get(name) != own_version
    ]
    if not differences:
        return ""
    return (
        f"it has {', '.join(differences)}: what workers are sent could not be read. Install the "
        "same versions on all hosts"
    )
