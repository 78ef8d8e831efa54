"""What the container allows: CPU time and memory limits of control groups, versions 1 and 2.

A container shows the cores and the memory of its host; what it may use stands here. A limit of
any group above this process counts, so each file is read on the whole way up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

__all__ = ["Limits", "read_limits"]

_Number = TypeVar("_Number", int, float)

# Version 1 writes "no limit" as a huge number, rounded down to a page.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The tightest limits on this process; None where there is none.

    Attributes:
        cpu_cores: Cores' worth of CPU time (1.5 is one and a half).
        memory_bytes: Memory that may be used in all.
        memory_free_bytes: What of it is left. File cache that can be dropped counts as free.
    """

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits from the file system.

    Args:
        root: Where ``proc`` and ``sys`` are found.

    Returns:
        The limits; none at all where control groups are absent or unreadable.
    """
    return Limits(
        cpu_cores=_least(_cpu_cores(folder) for folder in _folders(root, "cpu")),
        memory_bytes=_least(_memory_limit(folder) for folder in _folders(root, "memory")),
        memory_free_bytes=_least(_memory_free(folder) for folder in _folders(root, "memory")),
    )


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's groups for a controller, from its own up to the mount."""
    groups = dict(_groups(root))
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, options = left.split(), right.split()
        if len(fields) < 5 or len(options) < 3:
            continue
        if options[0] == "cgroup2":
            group = groups.get("")
        elif options[0] == "cgroup" and controller in options[2].split(","):
            group = groups.get(controller)
        else:
            continue
        if group is not None:
            mount = root / fields[4].lstrip("/")
            yield from _up(mount, _below(group, fields[3]))


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Each controller and the group of this process; version 2 has no controller's name."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _below(group: str, mounted: str) -> PurePosixPath:
    """The group's path under the mount, which in a container may show only a part of the tree."""
    try:
        return PurePosixPath(group).relative_to(mounted)
    except ValueError:
        return PurePosixPath()


def _up(mount: Path, below: PurePosixPath) -> Iterator[Path]:
    yield mount / below
    for parent in below.parents:
        yield mount / parent


def _cpu_cores(folder: Path) -> float | None:
    quota, period = [*_read(folder / "cpu.max").split(), "", ""][:2]  # version 2
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us")
        period = _read(folder / "cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
    return None


def _memory_free(folder: Path) -> int | None:
    limit = _memory_limit(folder)
    if limit is None:
        return None
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not used.isdecimal():
        return limit
    return min(limit, max(0, limit - int(used) + _droppable(folder)))


def _droppable(folder: Path) -> int:
    """File cache that the kernel takes back before it kills anything, in bytes."""
    found = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if " " in line)
    # Version 1 has both; the total includes groups below, as the limit does.
    text = found.get("total_inactive_file") or found.get("inactive_file") or "0"
    return int(text) if text.isdecimal() else 0


def _least(values: Iterable[_Number | None]) -> _Number | None:
    return min((value for value in values if value is not None), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):  # no such controller, or not ours to see
        return ""


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()
