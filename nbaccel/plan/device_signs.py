"""Whether a machine may have a device at all, before the device's own module looks for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from nbaccel.base import env
from nbaccel.base.optional_packages import is_installed
from nbaccel.config.capability_rows import DeviceSigns

__all__ = ["has_sign"]


def has_sign(signs: DeviceSigns, root: Path = Path("/")) -> bool:
    """Whether this machine has one of them; two listings of folders where it has none."""
    return (
        any(env.read(name) for name in signs.variables)
        or any(is_installed(package) for package in signs.packages)
        or any(any(root.glob(pattern)) for pattern in signs.files)
        or (bool(signs.pci_vendor) and signs.pci_vendor in _vendors_on_bus(root))
    )


def _vendors_on_bus(root: Path) -> set[str]:
    vendors = set()
    for path in (root / "sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):  # gone, or hidden
            vendors.add(path.read_text().strip().lower())
    return vendors
