"""Many tensors as one, for a collective that takes them all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def by_dtype(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in groups of one data type, in the order in which the types come."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield [tensor for tensor in tensors if tensor.dtype == dtype]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor of shape ``[n]`` with the elements of all."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor into tensors, in place."""
    untyped: Any = flat  # torch's `split` has no types
    pieces = untyped.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.detach().copy_(piece.view_as(tensor))
