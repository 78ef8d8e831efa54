"""``Inventory``: what this machine has, looked up without waking any of it.

No CUDA context, no XLA runtime, no thread pool, no import of torch: a notebook that has only
looked can still be forked. Facts come from NVML, ``/proc``, ``/sys`` and package metadata.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from nbaccel import env
from nbaccel.errors import ConfigError
from nbaccel.plan.cgroup import Limits, read_limits
from nbaccel.plan.gpus import Gpu, find_cards, visible
from nbaccel.plan.tpus import count_chips
from nbaccel.units import counted

__all__ = ["Gpu", "Inventory", "inspect_machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a launch can count on.

    Attributes:
        cpu_cores: Cores this process may use: affinity and the container's quota respected.
        host_total_bytes: Memory this process may use in all, the container's limit respected.
        host_available_bytes: What of it is free now.
        shm_bytes: Size of /dev/shm; 0 where there is none.
        gpus: NVIDIA GPUs that CUDA shows to this process, by their CUDA number.
        gpu_note: Why there are no GPUs, where something is known.
        tpu_chips: TPU chips of this host.
        platform: The operating system: ``linux``, ``darwin``, ``win32``.
        python_version: Such as ``3.12.4``.
        torch_version: Such as ``2.13.0+cpu``; empty where torch is not installed.
        front_end: ``jupyter``, ``colab``, ``kaggle``, ``terminal`` (somebody types) or ``none``.
        fork_supported: Whether a process can be forked.
        memfd_supported: Whether memory can be shared without a file (Linux).
    """

    cpu_cores: int
    host_total_bytes: int
    host_available_bytes: int
    shm_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    tpu_chips: int = 0
    platform: str = "linux"
    python_version: str = ""
    torch_version: str = ""
    front_end: str = "none"
    fork_supported: bool = True
    memfd_supported: bool = True

    def to_json(self) -> str:
        """All facts as one JSON object.

        Returns:
            Text that :meth:`from_json` reads.
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        """Read what :meth:`to_json` wrote.

        Args:
            text: A JSON object.

        Returns:
            The inventory.

        Raises:
            ConfigError: The text is not an inventory.
        """
        try:
            facts: dict[str, Any] = json.loads(text)
            gpus = tuple(_gpu(entry) for entry in facts.pop("gpus", ()))
            return cls(gpus=gpus, **facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"An Inventory cannot be read from {text[:60]!r}: {error}. "
                "A plan made from it would be for another machine. "
                "Use the text that Inventory.to_json() gives."
            ) from error


def _host_memory() -> tuple[int, int]:
    """Bytes of main memory: all, and what can be had now."""
    try:
        memory = psutil.virtual_memory()
    except OSError:  # no /proc: the C library still knows, though it counts no caches as free
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return memory.total, memory.available


def inspect_machine() -> Inventory:
    """Look at this machine and this process.

    Returns:
        What was found, a few milliseconds after the call; nothing was initialised for it.
    """
    environ = env.snapshot()
    limits = read_limits()
    total_bytes, available_bytes = _host_memory()
    cards, gpu_note = find_cards()
    gpus = visible(cards, environ.get("CUDA_VISIBLE_DEVICES"))
    if cards and not gpus:
        gpu_note = _hidden(len(cards), environ.get("CUDA_VISIBLE_DEVICES"))
    return Inventory(
        cpu_cores=_cpu_cores(limits),
        host_total_bytes=_least(total_bytes, limits.memory_bytes),
        host_available_bytes=_least(available_bytes, limits.memory_free_bytes),
        shm_bytes=_size_of(Path("/dev/shm")),
        gpus=gpus,
        gpu_note=gpu_note,
        tpu_chips=count_chips(environ),
        platform=sys.platform,
        python_version=platform.python_version(),
        torch_version=_version_of("torch"),
        front_end=_front_end(environ),
        fork_supported=hasattr(os, "fork"),
        memfd_supported=hasattr(os, "memfd_create"),
    )


def _cpu_cores(limits: Limits) -> int:
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # Half a core rounds down: a thread more than the quota is throttled, and all wait for it.
    return max(1, allowed if limits.cpu_cores is None else min(allowed, int(limits.cpu_cores)))


def _least(found: int, limit: int | None) -> int:
    return int(found) if limit is None else min(int(found), limit)


def _size_of(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):  # no such folder; no such call on Windows
        return 0
    return found.f_blocks * found.f_frsize


def _hidden(num_cards: int, setting: str | None) -> str:
    if setting is None:
        return f"{counted(num_cards, 'GPU')} in MIG mode without a MIG device"
    return f"CUDA_VISIBLE_DEVICES={setting!r} shows none of {counted(num_cards, 'GPU')}"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _front_end(environ: Mapping[str, str]) -> str:
    """Who shows what is printed. Hosted notebooks are Jupyter too, so they are asked first."""
    if "google.colab" in sys.modules:
        return "colab"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "kaggle"
    # Importing ipykernel makes no kernel; only its running application does.
    kernel = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    if kernel is not None and kernel.initialized():
        return "jupyter"
    return "terminal" if hasattr(sys, "ps1") or sys.flags.interactive else "none"


def _gpu(entry: dict[str, Any]) -> Gpu:
    major, minor = entry["compute_capability"]
    return Gpu(**{**entry, "compute_capability": (major, minor)})
