"""``ShardReader``: which elements of a partitioned parameter this process has.

DTensors say it themselves. A library that puts placeholders in the place of parameters (ZeRO-3), or
trains copies of higher precision beside them (ZeRO-1 and 2), has a reader in its capability row, so
that trained weights are copied back from wherever they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Piece", "Remembered", "ShardReader", "remember"]

Piece = tuple[int, "torch.Tensor"]
"""Number of the first element in the flattened whole, and the values, of shape ``[n]``."""


@dataclass(frozen=True)
class Remembered:
    """What a module was.

    Attributes:
        tensors: Format and attributes of each parameter and buffer, by name.
    """

    tensors: dict[str, tuple[torch.dtype, frozenset[str]]]


def remember(module: nn.Module) -> Remembered:
    """The state of a module that no library has taken over.

    Args:
        module: The module.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    return Remembered({name: (t.dtype, frozenset(vars(t))) for name, t in named})


class ShardReader(Protocol):
    """Functions of a module that reads one library's shards."""

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the library's. The other functions get such tensors only."""

    def whole_shape(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Shape of the whole, where a placeholder has another."""

    def local_pieces(self, tensor: torch.Tensor, held: object = None) -> list[Piece]:
        """The elements that this process has to copy back; none where it has none."""

    def hold(self, tensor: torch.Tensor) -> object:
        """What must be kept so that the pieces can be read when the engine is gone; or None."""

    def assign(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Put the values of the whole in this process's pieces."""

    def inner_module(self, module: nn.Module) -> nn.Module | None:
        """The user's module, if this is an engine around it."""

    def plain_state(self, module: nn.Module) -> dict[str, Any] | None:
        """The attributes of a module without the library's; None if it put none there."""

    def check_whole(self, module_or_state: Any, what: str) -> None:
        """Refuse a module or state dict in which placeholders stand for weights.

        Args:
            module_or_state: The module, or the state dict of one.
            what: What was asked for, to begin the message with.

        Raises:
            ConfigError: Some do.
        """

    def remember(self, module: nn.Module) -> Remembered:
        """The state of a module before the library took it over, if it did."""

    def take_back(self, module: nn.Module, remembered: Remembered) -> bool:
        """Make a module that the library took apart in this one process what it was.

        Returns:
            Whether it had been taken apart.
        """

    def building_whole(self) -> AbstractContextManager[None]:
        """A block in which the library does not cut models while they are built."""

    def leave(self) -> None:
        """Remove what the library keeps on disk for this process, which ends."""

    def forget_groups(self) -> None:
        """Torch's process groups are gone: forget those that the library made from them."""

    def tear_down(self, before: Any) -> None:
        """End the library's part of this process: engines, groups, variables.

        Args:
            before: What the ``observe`` of the capability row saw.
        """
