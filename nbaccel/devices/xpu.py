"""Intel GPUs. Never run: written from torch's documentation of ``torch.xpu``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nbaccel.plan.contracts.device import Device
from nbaccel.plan.inventory import Gpu

_CARDS = Path("/sys/class/drm")
_VENDOR = "0x8086"


class XpuDevice(Device):
    """Workers compute on Intel GPUs."""

    name: ClassVar[str] = "xpu"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Device.detect`; by the kernel's render nodes of Intel's cards."""
        # Render nodes, one per GPU: `card*` has entries for connectors, too.
        vendor_files = sorted(_CARDS.glob("render*/device/vendor")) if _CARDS.is_dir() else []
        intel_files = [
            vendor_file
            for vendor_file in vendor_files
            if vendor_file.read_text(encoding="ascii").strip() == _VENDOR
        ]
        gpus = (Gpu(index=i, name="Intel GPU", kind=self.name) for i in range(len(intel_files)))
        return {"accelerators": tuple(gpus)}

    def hazards(self) -> tuple[str, ...]:
        xpu = getattr(sys.modules.get("torch"), "xpu", None)
        if xpu is not None and xpu.is_initialized():
            return ("torch has an XPU context in this process",)
        return ()
