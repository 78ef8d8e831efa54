"""Google TPUs: detected, but not used by this version."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.abc.device import Device
from nbaccel.plan.inventory import Gpu
from nbaccel.units import count_noun

if TYPE_CHECKING:
    from nbaccel.plan.inventory import Inventory

__all__ = ["TpuDevice", "count_chips"]

_GOOGLE_VENDOR_ID = "0x1ae0"
# Google's network and storage devices have the same vendor, so the device decides:
# v2/v3, an unnamed one, v4, v5p, v5e, v6e, 7x.
_TPU_DEVICE_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME")
_ACCEL_FILE = re.compile(r"accel\d+")
_VFIO_GROUP = re.compile(r"\d+")


def count_chips(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many TPU chips this process could open.

    Args:
        environ: The process environment, whose TPU variables confirm an ambiguous device file.
        root: Where ``dev`` and ``sys`` are found.

    Returns:
        The number of chips; 0 where only the environment mentions a TPU.
    """
    accel_files = _count_matching(root / "dev", _ACCEL_FILE)
    if accel_files:
        return accel_files
    # Newer hosts hand chips out by vfio, which other devices use too: count only what the PCI
    # bus confirms, or what the environment of a TPU host (a container may hide the bus) does.
    vfio_groups = _count_matching(root / "dev/vfio", _VFIO_GROUP)
    chips_on_bus = _count_on_bus(root / "sys/bus/pci/devices")
    if chips_on_bus:
        return min(vfio_groups, chips_on_bus)
    is_tpu_host = environ.get("PJRT_DEVICE", "").upper() == "TPU" or any(
        environ.get(variable_name) for variable_name in _TPU_VARIABLES
    )
    return vfio_groups if is_tpu_host else 0


def _count_matching(folder: Path, pattern: re.Pattern[str]) -> int:
    try:
        return sum(1 for entry in folder.iterdir() if pattern.fullmatch(entry.name))
    except OSError:
        return 0


def _count_on_bus(folder: Path) -> int:
    try:
        pci_devices = list(folder.iterdir())
    except OSError:
        return 0
    return sum(
        1
        for pci_device in pci_devices
        if _read_sysfs(pci_device / "vendor") == _GOOGLE_VENDOR_ID
        and _read_sysfs(pci_device / "device") in _TPU_DEVICE_IDS
    )


def _read_sysfs(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""


class TpuDevice(Device):
    """TPU chips of this host; workers cannot compute on them yet."""

    name: ClassVar[str] = "tpu"
    torch_type: ClassVar[str] = "xla"
    after_fork: ClassVar[str] = "a forked worker hangs in its first XLA operation"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Device.detect`; by device files and the PCI bus."""
        return {"tpu_chips": count_chips(environ)}

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        """See :meth:`Device.units`."""
        chips = range(inventory.tpu_chips)
        return tuple(Gpu(index=index, name="TPU chip", kind=self.name) for index in chips)

    def refusal(self, inventory: Inventory) -> str:
        """See :meth:`Device.refusal`; always one."""
        num_chips = inventory.tpu_chips
        chips_text = (
            count_noun(num_chips, "TPU chip") if num_chips else "a machine without TPU chips"
        )
        return (
            f'device="tpu" cannot be served: got {chips_text}. This version of nbaccel detects '
            'TPUs and does not drive them. Give device="cpu", or "auto" to take what there is.'
        )

    def idle_reason(self, inventory: Inventory) -> str:
        """See :meth:`Device.idle_reason`."""
        return "this version of nbaccel has no TPU backend"

    def hazards(self) -> tuple[str, ...]:
        """See :meth:`Device.hazards`."""
        torch_xla = sys.modules.get("torch_xla")
        if torch_xla is None:
            return ()
        # There is no public way to ask without initialising it.
        core = getattr(torch_xla, "_XLAC", None)
        is_initialised = getattr(core, "_xla_runtime_is_initialized", None)
        if is_initialised is None:
            return ("torch_xla is imported, and this version cannot tell whether its runtime runs",)
        return ("the XLA runtime is initialised in the notebook",) if is_initialised() else ()
