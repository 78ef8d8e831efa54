"""The processor, Intel GPUs, and that of Apple silicon.

The processor is always there, shared by all workers, never in the way of a fork. The other two have
never been run: they are written from torch's documentation.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.plan.contracts.device import Device
from nbaccel.plan.inventory import Gpu

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Inventory


class CpuDevice(Device):
    """Workers compute on the processor's cores."""

    name: ClassVar[str] = "cpu"
    pins_host_memory: ClassVar[bool] = False
    # torch's host generator is always saved, under a name that is no device's.
    has_random_state: ClassVar[bool] = False

    def refusal(self, inventory: Inventory) -> str:
        return ""

    def is_available(self) -> bool:
        return True

    def random_state(self, index: int | None = None) -> torch.Tensor:
        import torch

        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        import torch

        # torch accepts host tensors only; a checkpoint may have been read to a device.
        torch.set_rng_state(state.cpu())

    def torch_device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device(self.kind)

    def make_current(self, device: torch.device) -> None:
        pass  # there is nothing to choose

    def limit_memory(self, limit_bytes: int) -> None:
        pass  # the host's memory is limited by the system


_CARDS = Path("/sys/class/drm")
_VENDOR = "0x8086"


class XpuDevice(Device):
    """Workers compute on Intel GPUs."""

    name: ClassVar[str] = "xpu"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        # Render nodes, one per GPU: `card*` has entries for connectors, too.
        vendor_files = sorted(_CARDS.glob("render*/device/vendor")) if _CARDS.is_dir() else []
        num_gpus = sum(file.read_text(encoding="ascii").strip() == _VENDOR for file in vendor_files)
        gpus = (Gpu(index=i, name="Intel GPU", kind=self.name) for i in range(num_gpus))
        return {"accelerators": tuple(gpus)}

    def hazards(self) -> tuple[str, ...]:
        xpu = getattr(sys.modules.get("torch"), "xpu", None)
        if xpu is not None and xpu.is_initialized():
            return ("torch has an XPU context in this process",)
        return ()


class MpsDevice(Device):
    """A process computes on the GPU of its Mac."""

    name: ClassVar[str] = "mps"
    pins_host_memory: ClassVar[bool] = False  # host and GPU share their memory

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
            return {}
        return {"accelerators": (Gpu(index=0, name="Apple GPU", kind=self.name),)}

    def is_available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def is_awake(self) -> bool:
        return self.is_available()  # torch reports no more

    def random_state(self, index: int | None = None) -> torch.Tensor:
        return super().random_state()

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        super().set_random_state(state)

    def reserved_bytes(self, device: torch.device) -> int:
        return int(self._module().driver_allocated_memory())
