"""This machine, with no device initialised; limits of all its control groups count."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import psutil

from nbaccel.base import env
from nbaccel.base.optional_packages import installed_version
from nbaccel.config.capabilities import DEVICES, ENTRY_POINT_PROBLEMS
from nbaccel.plan import registry
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.topology import shared_memory_bytes

_LimitNumber = TypeVar("_LimitNumber", int, float)

_cached_version = functools.cache(installed_version)
# Version 1 writes "no limit" as a huge number, rounded down to a page.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The tightest limits on this process; None where there is none."""

    cpu_cores: float | None = None  # cores' worth of CPU time (1.5 is one and a half)
    memory_bytes: int | None = None  # memory that may be used in all
    # Bytes of it that are left. File cache that can be dropped counts as free.
    memory_free_bytes: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits from the file system."""
    cpu_folders, memory_folders = (_cgroup_folders(root, name) for name in ("cpu", "memory"))
    return Limits(
        cpu_cores=_smallest_limit(map(_cgroup_cpu_cores, cpu_folders)),
        memory_bytes=_smallest_limit(map(_cgroup_memory_limit, memory_folders)),
        memory_free_bytes=_smallest_limit(map(_cgroup_memory_free, memory_folders)),
    )


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's groups for a controller, from its own up to the mount."""
    folders = []
    # Version 2 has no controller's name.
    groups_by_controller: dict[str, str] = {}
    for group_line in env.read_file(root / "proc/self/cgroup").splitlines():
        controllers, _, path = group_line.partition(":")[2].partition(":")
        groups_by_controller |= dict.fromkeys(controllers.split(","), path)
    for mount_line in env.read_file(root / "proc/self/mountinfo").splitlines():
        mount_fields_text, _, filesystem_text = mount_line.partition(" - ")
        mount_fields = mount_fields_text.split()
        filesystem_fields = filesystem_text.split()
        if len(mount_fields) < 5 or len(filesystem_fields) < 3:
            continue
        # Version 2 has one tree for all controllers; hosts may mount both versions.
        if filesystem_fields[0] == "cgroup2":
            group = groups_by_controller.get("")
        elif filesystem_fields[0] == "cgroup" and controller in filesystem_fields[2].split(","):
            group = groups_by_controller.get(controller)
        else:
            continue
        if group is not None:
            mount_folder = root / mount_fields[4].lstrip("/")
            own_path = _path_below_mount(group, mount_fields[3])
            folders += [mount_folder / part for part in (own_path, *own_path.parents)]
    return folders


def _path_below_mount(group_path: str, mounted_path: str) -> PurePosixPath:
    """The group's path under the mount, which in a container may show only a part of the tree."""
    try:
        return PurePosixPath(group_path).relative_to(mounted_path)
    except ValueError:
        # The path is that of the host: the container's own group is the mount itself.
        return PurePosixPath()


def _cgroup_cpu_cores(folder: Path) -> float | None:
    texts = env.read_file(folder / "cpu.max").split()  # version 2
    if not texts:
        texts = [env.read_file(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    quota, *periods = [int(text) if text.isdecimal() else 0 for text in texts]
    return quota / periods[0] if quota and any(periods) else None


def _cgroup_memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = env.read_file(folder / name)
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
    return None


def _cgroup_memory_free(folder: Path) -> int | None:
    memory_limit = _cgroup_memory_limit(folder)
    if memory_limit is None:
        return None
    used_files = (folder / name for name in ("memory.current", "memory.usage_in_bytes"))
    text = next(filter(None, map(env.read_file, used_files)), "")
    # Without the use the limit alone is known, which is still tighter than the host's memory.
    if not text.isdecimal():
        return memory_limit
    # File cache is free: the kernel takes it back before it kills anything.
    lines = env.read_file(folder / "memory.stat").splitlines()
    memory_stat = dict(line.split()[:2] for line in lines if " " in line)
    # Version 1 has both; the total includes groups below, as the limit does.
    cache = memory_stat.get("total_inactive_file") or memory_stat.get("inactive_file") or "0"
    cache_bytes = int(cache) if cache.isdecimal() else 0
    return min(memory_limit, max(0, memory_limit - int(text) + cache_bytes))


def _smallest_limit(values: Iterable[_LimitNumber | None]) -> _LimitNumber | None:
    return min((value for value in values if value is not None), default=None)


def _host_memory() -> tuple[int, int]:
    try:
        memory = psutil.virtual_memory()
    except OSError:  # no /proc: the C library has numbers, too, but counts no caches as free
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return page_bytes * os.sysconf("SC_PHYS_PAGES"), page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    return memory.total, memory.available


def free_host_bytes() -> int:
    """Bytes of host memory that are free now, the container's limit respected."""
    return _smaller_bytes(_host_memory()[1], read_limits().memory_free_bytes)


def inspect_machine() -> Inventory:
    """Look at this machine and this process.

    Returns:
        What was found, a few milliseconds after the call; nothing was initialised for it.
    """
    environ = env.snapshot()
    limits = read_limits()
    total_bytes, available_bytes = _host_memory()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if limits.cpu_cores is not None:
        # Rounded down: the kernel throttles a process with more threads than its quota.
        cores = min(cores, int(limits.cpu_cores))
    return Inventory(
        cpu_cores=max(1, cores),
        host_total_bytes=_smaller_bytes(total_bytes, limits.memory_bytes),
        host_available_bytes=_smaller_bytes(available_bytes, limits.memory_free_bytes),
        shm_bytes=shared_memory_bytes()[0],
        platform=sys.platform,
        torch_version=_cached_version("torch"),
        fork_supported=hasattr(os, "fork"),
        memfd_supported=hasattr(os, "memfd_create"),
        **_detect_accelerators(environ),
    )


def _detect_accelerators(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the inventory that the devices of the table fill."""
    problems = [*ENTRY_POINT_PROBLEMS]
    device_facts: dict[str, Any] = {}
    for row in DEVICES:
        if row.signs is not None and not registry.has_sign(row.signs):
            continue
        try:
            detected = registry.device(row.name).detect(environ)
        except Exception as error:  # code of another package must not prevent every launch
            text = f"{type(error).__name__}: {error}".removesuffix(".")
            problems.append(
                f"device={row.name!r} could not be looked for: {text}. It is taken as "
                "missing. Repair or uninstall the package that adds it."
            )
            continue
        accelerators = (*device_facts.get("accelerators", ()), *detected.get("accelerators", ()))
        device_facts |= {**detected, "accelerators": accelerators}
    return device_facts | {"problems": tuple(problems)}


def _smaller_bytes(found_bytes: int, limit_bytes: int | None) -> int:
    return int(found_bytes) if limit_bytes is None else min(int(found_bytes), limit_bytes)
