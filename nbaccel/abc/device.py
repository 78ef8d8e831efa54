"""``Device``: what launching must know of the hardware that workers compute on.

An implementation has no state: it may be asked in the notebook, in the template and in a
worker. Only :meth:`Device.enter_worker` may wake the hardware.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Inventory

__all__ = ["Device"]


class Device(ABC):
    """One kind of hardware.

    Attributes:
        name: As in its capability row.
    """

    name: ClassVar[str]

    @abstractmethod
    def count(self, inventory: Inventory) -> int:
        """How many workers can have a device of their own.

        Args:
            inventory: What the machine has.

        Returns:
            Devices of this kind that a launch can use.
        """

    @abstractmethod
    def process_group_backend(self, num_local: int, inventory: Inventory) -> str:
        """The process group backend for the workers of one node.

        Args:
            num_local: Workers on this node.
            inventory: What the machine has.

        Returns:
            The name that ``torch.distributed.init_process_group`` takes.
        """

    @abstractmethod
    def enter_worker(self, local_rank: int) -> None:
        """Make a worker's device its current one; called once, in the worker, before its code.

        Args:
            local_rank: Number of the worker on its node.
        """

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """The device of a worker, as torch names it.

        Args:
            local_rank: Number of the worker on its node.

        Returns:
            The device; workers beyond the number of devices share them in turn.
        """

    @abstractmethod
    def hazards(self) -> tuple[str, ...]:
        """What this device has done to the calling process that makes forking it unsafe.

        Looked up without waking the device: the answer in an untouched process is empty and
        leaves it untouched.

        Returns:
            Facts, each a clause: what it is and what it would do to a forked worker.
        """

    @abstractmethod
    def describe(self, inventory: Inventory) -> str:
        """What the machine has of this device, for people.

        Args:
            inventory: What the machine has.

        Returns:
            A few words.
        """
