"""The packages that drive TPUs, found by their metadata: none of them is imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from nbaccel.base.optional_packages import metadata_version

# Sophgo's package has the same name and the same module; only the entry point tells them apart.
TORCH_TPU_EXTENSION = "torch_tpu._loader:load"
"""By what torch's entry point ``torch.backends`` imports torch_tpu."""

_TORCH_TPU_ENTRY_POINT = ("torch.backends", TORCH_TPU_EXTENSION)
# In this order torch_xla takes a path from the environment.
_LIBRARY_VARIABLES = ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverPackages:
    """What is installed.

    Attributes:
        torch: Version of torch; this and all others are empty where it is not installed.
        torch_tpu: Version of Google's torch_tpu.
        foreign_torch_tpu: Version of another package of that name.
        torch_xla: Version of torch_xla.
        libtpu: Version of libtpu, or the path of the one that is loaded instead of it.
    """

    torch: str = ""
    torch_tpu: str = ""
    foreign_torch_tpu: str = ""
    torch_xla: str = ""
    libtpu: str = ""


def find_packages(
    environ: Mapping[str, str], search_path: Sequence[str] | None = None
) -> DriverPackages:
    """Look for the drivers."""
    torch_tpu, torch_xla = (_find(name, search_path) for name in ("torch_tpu", "torch_xla"))
    is_googles = torch_tpu is not None and any(
        (entry_point.group, entry_point.value) == _TORCH_TPU_ENTRY_POINT
        for entry_point in torch_tpu.entry_points
    )
    return DriverPackages(
        torch=_version_of(_find("torch", search_path)),
        torch_tpu=_version_of(torch_tpu) if is_googles else "",
        foreign_torch_tpu="" if is_googles else _version_of(torch_tpu),
        torch_xla=_version_of(torch_xla),
        libtpu=_find_libtpu(environ, torch_xla, search_path),
    )


def _find_libtpu(
    environ: Mapping[str, str], torch_xla: Distribution | None, search_path: Sequence[str] | None
) -> str:
    distribution = _find("libtpu", search_path) or _find("libtpu-nightly", search_path)
    named_path = next((path for name in _LIBRARY_VARIABLES if (path := environ.get(name))), "")
    # Both drivers write the path of an installed libtpu into the environment when they are
    # imported: the version says more then.
    if named_path and (distribution is None or not _lies_in(named_path, distribution)):
        return named_path
    if distribution is not None:
        return _version_of(distribution)
    bundled_path = None if torch_xla is None else torch_xla.locate_file("torch_xla/lib/libtpu.so")
    return (
        str(bundled_path) if bundled_path is not None and Path(str(bundled_path)).exists() else ""
    )


def _lies_in(path: str, distribution: Distribution) -> bool:
    return Path(path).is_relative_to(str(distribution.locate_file("libtpu")))


def _find(name: str, search_path: Sequence[str] | None) -> Distribution | None:
    folders = list(sys.path if search_path is None else search_path)
    return next(iter(Distribution.discover(name=name, path=folders)), None)


def _version_of(distribution: Distribution | None) -> str:
    return "" if distribution is None else metadata_version(distribution)
