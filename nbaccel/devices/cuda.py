"""NVIDIA GPUs: one for each worker, or shared in turn.

A CUDA context cannot be forked: its copy fails in the first call. So nothing here touches CUDA
outside a worker, and :meth:`CudaDevice.hazards` finds a context by the traces it leaves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nbaccel.abc.device import Device
from nbaccel.capabilities import device_row, group_backend
from nbaccel.units import format_bytes

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Inventory

__all__ = ["CudaDevice", "driver_in_use"]

_DRIVER = "/libcuda.so"
# The driver's own devices, and the one it has under WSL.
_NODES = ("/dev/nvidia", "/dev/dxg")


class CudaDevice(Device):
    """Workers compute on NVIDIA GPUs."""

    name: ClassVar[str] = "cuda"

    def count(self, inventory: Inventory) -> int:
        """See :meth:`Device.count`."""
        return len(inventory.gpus)

    def process_group_backend(self, num_local: int, inventory: Inventory) -> str:
        """See :meth:`Device.process_group_backend`; nccl unless workers share a GPU."""
        row = device_row(self.name)
        return group_backend(row, num_local=num_local, num_devices=self.count(inventory))

    def enter_worker(self, local_rank: int) -> None:
        """See :meth:`Device.enter_worker`."""
        import torch

        torch.cuda.set_device(self.torch_device(local_rank))

    def torch_device(self, local_rank: int) -> torch.device:
        """See :meth:`Device.torch_device`."""
        import torch

        # device_count() asks NVML, not CUDA, as long as CUDA is not initialised.
        return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))

    def hazards(self) -> tuple[str, ...]:
        """See :meth:`Device.hazards`."""
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

    def describe(self, inventory: Inventory) -> str:
        """See :meth:`Device.describe`."""
        if not inventory.gpus:
            return f"no GPU ({inventory.gpu_note})" if inventory.gpu_note else "no GPU"
        return ", ".join(
            f"{gpu.index}: {gpu.name} ({format_bytes(gpu.total_bytes)})" for gpu in inventory.gpus
        )


def driver_in_use(process: Path = Path("/proc/self")) -> bool:
    """Whether a process has the CUDA driver initialised, by the traces it leaves.

    Args:
        process: The process's folder under ``/proc``.

    Returns:
        True where the driver's library is mapped and a device of it is open. Either alone
        means nothing: torch may map the library, and NVML opens the devices for a moment.
    """
    try:
        mapped = _DRIVER in (process / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    return mapped and any(name.startswith(_NODES) for name in _open_files(process / "fd"))


def _open_files(folder: Path) -> list[str]:
    names = []
    for entry in folder.iterdir():
        try:
            names.append(os.readlink(entry))
        except OSError:  # closed meanwhile, as the one of this listing is
            continue
    return names
