"""The processor: always there, shared by all workers, never in the way of a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nbaccel.abc.device import Device
from nbaccel.capabilities import device_row, group_backend
from nbaccel.units import counted, format_bytes

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Inventory

__all__ = ["CpuDevice"]


class CpuDevice(Device):
    """Workers compute on the processor's cores."""

    name: ClassVar[str] = "cpu"

    def count(self, inventory: Inventory) -> int:
        """See :meth:`Device.count`; every core counts."""
        return inventory.cpu_cores

    def process_group_backend(self, num_local: int, inventory: Inventory) -> str:
        """See :meth:`Device.process_group_backend`; always gloo."""
        row = device_row(self.name)
        return group_backend(row, num_local=num_local, num_devices=self.count(inventory))

    def enter_worker(self, local_rank: int) -> None:
        """See :meth:`Device.enter_worker`; there is nothing to choose."""

    def torch_device(self, local_rank: int) -> torch.device:
        """See :meth:`Device.torch_device`; the same for all."""
        import torch

        return torch.device("cpu")

    def hazards(self) -> tuple[str, ...]:
        """See :meth:`Device.hazards`; threads and thread pools are judged by the launcher."""
        return ()

    def describe(self, inventory: Inventory) -> str:
        """See :meth:`Device.describe`."""
        memory = format_bytes(inventory.host_total_bytes)
        return f"{counted(inventory.cpu_cores, 'core')}, {memory}"
