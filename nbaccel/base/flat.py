"""Many tensors as one, for a collective that takes them all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def average(tensors: Sequence[torch.Tensor], world_size: int, *, by_host: bool = False) -> None:
    """Average tensors over all processes in place, in one collective for each data type.

    By way of host memory that is one copy down and one up, whatever their number; on a device that
    compiles each collective, one program.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        reduced = flat.cpu() if by_host else flat
        dist.all_reduce(reduced)
        means: Any = (reduced / world_size).to(flat.device)  # torch's `split` has no types
        pieces = means.split([tensor.numel() for tensor in alike])
        for tensor, piece in zip(alike, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
