"""``TpuDriver``: what the libraries that let torch compute on TPUs have in common.

    device "tpu" ──► TorchTpuDriver   tensor.to("tpu"), computes at once     torch 2.11 to 2.15
                 └─► TorchXlaDriver   tensor.to("xla"), records, then runs   torch 2.9

Nothing outside of the two drivers calls either library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbaccel.plan.contracts.device import CompileCounts
    from nbaccel.plan.inventory import TpuHost


class TpuDriver(ABC):
    """One library that drives TPUs.

    An implementation has no state beyond that of its library, and imports it inside of methods.
    """

    name: ClassVar[str]  # as in ``RunConfig.tpu_driver``
    torch_type: ClassVar[str]  # what torch calls its devices

    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether this process can make tensors of this kind; nothing is imported for it."""

    @abstractmethod
    def load(self) -> None:
        """Import the library, without initialising its runtime."""

    @abstractmethod
    def is_awake(self) -> bool:
        """Whether its runtime is initialised in this process; asking does not initialise it."""

    def holds_chips(self) -> bool:
        """Whether this process has chips that no other can use before it ends."""
        return self.is_awake()

    def fork_problem(self) -> str:
        """What this process has done with the library that a fork of it could not live with."""
        return (
            f"the runtime of {self.name} is initialised in the notebook" if self.is_awake() else ""
        )

    @abstractmethod
    def bind(self, local_rank: int) -> None:
        """Take the chip of this worker, which no process gives back before it ends."""

    @abstractmethod
    def launch_variables(
        self, host: TpuHost, num_workers: int, ports: Sequence[int]
    ) -> tuple[Mapping[str, str], ...]:
        """Variables of the workers of one launch, by local rank."""

    def all_chips_variables(self) -> Mapping[str, str]:
        """Variables of a single worker that drives all chips, where the driver can do that."""
        return {}

    def process_group_backend(self) -> str:
        """What ``torch.distributed.init_process_group`` is told in a worker."""
        return "gloo"

    @abstractmethod
    def average_gradients(self, gradients: Sequence[torch.Tensor], world_size: int) -> bool:
        """See :meth:`~nbaccel.plan.contracts.device.DeviceRuntime.average_gradients`."""

    def downcast_floats(self) -> str:
        return (
            f"{self.name} has no such mode. Autocast computes in bfloat16, and weights and doubles "
            "stay as they are"
        )

    def mark_step(self) -> None:  # noqa: B027 - a driver that computes at once has nothing to do
        """See :meth:`~nbaccel.plan.contracts.device.DeviceRuntime.mark_step`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the chip has done what it was given."""

    @abstractmethod
    def compile_counts(self) -> CompileCounts:
        """What its compiler has done in this process so far."""

    @abstractmethod
    def random_state(self) -> torch.Tensor:
        """The chip's generator, as a uint8 tensor in host memory."""

    @abstractmethod
    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the chip's generator to what :meth:`random_state` gave."""

    @abstractmethod
    def memory_used(self) -> int | None:
        """Bytes in use on this process's chip; None where the runtime does not say."""


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers one after another, each staying the same Python object.

    ``Module.to`` makes new parameters on TPUs: those of an optimizer would stay behind on the
    host, and weights that were tied would be two (torch_tpu 0.2, torch_xla 2.9).
    """
    import torch

    from nbaccel.base import torch_private

    moved_buffers: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in moved_buffers:
                moved_buffers[id(buffer)] = buffer.detach().to(device)
            setattr(owner, name, moved_buffers[id(buffer)])
    for parameter in module.parameters():
        if parameter.device == device:
            continue
        gradient = parameter.grad
        parameter.grad = None
        # A blocking copy: with a non-blocking one, a later write to the host tensor showed in the
        # copy (torch_tpu 0.2).
        on_device = torch.nn.Parameter(
            parameter.detach().to(device), requires_grad=parameter.requires_grad
        )
        torch_private.replace_in_place(parameter, on_device)
        if gradient is not None:
            parameter.grad = gradient.to(device)
