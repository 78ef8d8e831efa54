"""``Place``: where a training process stands among the others, and what it computes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process of a training run.

    Attributes:
        rank: Its number among all processes, from 0.
        local_rank: Its number on its node, from 0.
        world_size: Processes in total.
        local_world_size: Processes on its node.
        device: What it computes on.
        device_row: The row of that device, where torch's name for it is another.
        backend: Process group backend, as torch names it; empty where there is no group.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device
    device_row: str = ""
    backend: str = ""

    @property
    def device_name(self) -> str:
        """The capability row of what it computes on."""
        return self.device_row or self.device.type

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is process 0 of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the process of the highest rank."""
        return self.rank == self.world_size - 1

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self.world_size == 1
