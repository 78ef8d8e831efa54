"""``ShardReader``: which elements of a parameter this process has, where a library cut it up.

DTensors say it themselves. A library that puts placeholders in the place of parameters (ZeRO-3), or
trains copies of higher precision beside them (ZeRO-1 and 2), has a reader in its capability row, so
that trained weights come home from wherever they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "ShardReader"]

Piece = tuple[int, "torch.Tensor"]
"""Number of the first element in the flattened whole, and the values, of shape ``[n]``."""


class ShardReader(Protocol):
    """Functions of a module that reads one library's shards."""

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the library's. The others are asked of such tensors only."""

    def whole_shape(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Shape of the whole, where a placeholder has another."""

    def local_pieces(self, tensor: torch.Tensor, held: object = None) -> list[Piece]:
        """The elements that are this process's to bring home; none where it has none."""

    def hold(self, tensor: torch.Tensor) -> object:
        """What must be kept so that the pieces can be read when the engine is gone; or None."""

    def assign(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Put the values of the whole in this process's pieces."""
