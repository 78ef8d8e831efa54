"""NVIDIA GPUs: one for each worker, or shared in turn.

A CUDA context cannot be forked: its copy fails in the first call. So nothing here touches CUDA
outside a worker, and :meth:`CudaDevice.hazards` finds a context by the traces it leaves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.devices import nvml
from nbaccel.plan.contracts.device import Device

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Gpu, Inventory

_DRIVER_LIBRARY = "/libcuda.so"
# The driver's own devices, and the one it has under WSL.
_DEVICE_NODES = ("/dev/nvidia", "/dev/dxg")


class CudaDevice(Device):
    """Workers compute on NVIDIA GPUs."""

    name: ClassVar[str] = "cuda"
    after_fork: ClassVar[str] = "a forked worker could not use the GPU at all"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Device.detect`; by NVML."""
        setting = environ.get("CUDA_VISIBLE_DEVICES")
        gpus, note = nvml.find_gpus(setting)
        # CUDA counts the fastest first, unless it is told to count as NVML does.
        is_same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        is_mixed = len({gpu.compute_capability for gpu in gpus}) > 1
        return {
            "gpus": gpus,
            "gpu_note": note,
            "gpu_setting": setting,
            "gpu_order_known": is_same_order or not is_mixed,
        }

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        return inventory.gpus

    def refusal(self, inventory: Inventory) -> str:
        """See :meth:`Device.refusal`; a GPU is of no use to a torch built for CPUs only."""
        if not inventory.gpus:
            return (
                'device="cuda" needs a GPU: got a machine without one that can be used '
                f"({inventory.gpu_note or 'none found'}). Workers would fail in their first CUDA "
                'call. Give device="cpu", or "auto" to take what there is.'
            )
        remedy = self.idle_reason(inventory)
        built = inventory.torch_version
        if not remedy:
            return ""
        return (
            f'device="cuda" needs a CUDA build of PyTorch: got torch {built}. '
            f"Workers would fail in their first CUDA call. {remedy}."
        )

    def idle_reason(self, inventory: Inventory) -> str:
        # Read from the version, because asking `torch.cuda` would need torch imported in the
        # notebook.
        if not inventory.torch_version.endswith("+cpu"):
            return ""
        return (
            f"torch {inventory.torch_version} is built for CPUs only. "
            "Install a CUDA build of PyTorch"
        )

    def hazards(self) -> tuple[str, ...]:
        # A torch that is still being imported has no `cuda` yet.
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            return (
                "torch has a CUDA context in this process: in a forked worker the first CUDA "
                "call would fail",
            )
        if driver_in_use():
            return (
                "a library other than torch uses the CUDA driver in this process: in a forked "
                "worker the first CUDA call would fail",
            )
        return ()

    def driver_meter(self) -> nvml.Meter | None:
        """See :meth:`Device.driver_meter`; the driver needs no CUDA context for it."""
        return nvml.Meter.open()

    def is_available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def capability(self, device: torch.device) -> tuple[int, int]:
        import torch

        return torch.cuda.get_device_capability(device)


def driver_in_use(process: Path = Path("/proc/self")) -> bool:
    """Whether a process has the CUDA driver initialised, by the traces it leaves."""
    try:
        # Paths in it need not be UTF-8.
        mapped = _DRIVER_LIBRARY in (process / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    return mapped and any(name.startswith(_DEVICE_NODES) for name in _open_files(process / "fd"))


def _open_files(folder: Path) -> list[str]:
    names = []
    for entry in folder.iterdir():
        try:
            names.append(os.readlink(entry))
        except OSError:  # closed meanwhile, as the descriptor of this listing is
            continue
    return names
