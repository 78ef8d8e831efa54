"""The processor: always there, shared by all workers, never in the way of a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nbaccel.plan.contracts.device import Device

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
        """See :meth:`DeviceRuntime.make_current`; there is nothing to choose."""

    def limit_memory(self, limit_bytes: int) -> None:
        """See :meth:`DeviceRuntime.limit_memory`; the host's memory is limited by the system."""
