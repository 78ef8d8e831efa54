"""TPU chips, found by their traces in the file system: no runtime is started to count them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["count_chips"]

_VENDOR = "0x1ae0"
# Google's network and storage devices have the same vendor, so the device decides:
# v2/v3, an unnamed one, v4, v5p, v5e, v6e, 7x.
_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_HINTS = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME")
_ACCEL = re.compile(r"accel\d+")
_VFIO = re.compile(r"\d+")


def count_chips(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many TPU chips this process could open.

    Args:
        environ: The process environment, whose TPU variables back a doubtful trace.
        root: Where ``dev`` and ``sys`` are found.

    Returns:
        The number of chips; 0 where only the environment speaks of a TPU.
    """
    accel = _count(root / "dev", _ACCEL)
    if accel:
        return accel
    # Newer hosts hand chips out by vfio, which other devices use too: count only what the PCI
    # bus confirms, or what the environment of a TPU host (a container may hide the bus) does.
    groups = _count(root / "dev/vfio", _VFIO)
    on_bus = _count_on_bus(root / "sys/bus/pci/devices")
    if on_bus:
        return min(groups, on_bus)
    promised = environ.get("PJRT_DEVICE", "").upper() == "TPU" or any(
        environ.get(name) for name in _HINTS
    )
    return groups if promised else 0


def _count(folder: Path, pattern: re.Pattern[str]) -> int:
    try:
        return sum(1 for entry in folder.iterdir() if pattern.fullmatch(entry.name))
    except OSError:
        return 0


def _count_on_bus(folder: Path) -> int:
    try:
        devices = list(folder.iterdir())
    except OSError:
        return 0
    return sum(
        1
        for device in devices
        if _read(device / "vendor") == _VENDOR and _read(device / "device") in _DEVICES
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""
