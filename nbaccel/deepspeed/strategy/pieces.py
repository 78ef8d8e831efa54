"""Which elements of a parameter this process has, under each ZeRO stage.

    stage 3       a placeholder; this process's part of the weights, and of their float32 copy
    stages 1, 2   whole weights, and this process's part of their float32 copy
    stage 0       whole weights; nothing is cut, and they come home as any module's

The float32 copy is what was trained, so that it comes home, and no process ever holds all of it.
What a launch and a pool ask, :mod:`~nbaccel.deepspeed.strategy.reader`, begins here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbaccel.abc.shards import Piece
from nbaccel.deepspeed.strategy import on_disk

__all__ = ["assign", "hold", "is_cut", "is_partitioned", "local_pieces", "shape_of", "whole_shape"]


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 has it in parts; gathered at the moment or not."""
    return hasattr(tensor, "ds_shape")  # flat groups of its own have a `ds_id`, too


def is_cut(tensor: torch.Tensor) -> bool:
    """See :meth:`ShardReader.is_cut`."""
    return is_partitioned(tensor) or hasattr(tensor, "_hp_mapping")


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """See :meth:`ShardReader.whole_shape`."""
    return tuple(tensor.ds_shape) if is_partitioned(tensor) else None  # type: ignore[attr-defined]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole, for any tensor."""
    found = whole_shape(tensor)
    return tuple(tensor.shape) if found is None else found


def local_pieces(tensor: torch.Tensor, held: Any = None) -> list[Piece]:
    """See :meth:`ShardReader.local_pieces`; empty where this process has nothing of it."""
    if is_partitioned(tensor):
        return _of_placeholder(tensor)
    mapping = getattr(tensor, "_hp_mapping", None)
    if mapping is not None:
        return [_of_mapping(mapping)]
    if held is not None:
        return [_of_destroyed(tensor, held)]
    # It is None where the float32 copy is another rank's, and after an engine that never stepped.
    return []


def hold(tensor: torch.Tensor) -> object:
    """See :meth:`ShardReader.hold`; an engine that is destroyed forgets its float32 copies."""
    return getattr(tensor, "_hp_mapping", None)


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """See :meth:`ShardReader.assign`; the float32 copy and the weights themselves."""
    flat = whole.reshape(-1)
    if _is_swapped(tensor):
        _write_to_disk(tensor, flat)
    else:
        for start, values in local_pieces(tensor):
            values.copy_(flat[start : start + values.numel()])
    if not is_partitioned(tensor):
        tensor.data.copy_(whole)
        return
    part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    start, count = _span(tensor)
    if on_disk.is_on_disk(tensor):
        on_disk.write_part(tensor, flat[start : start + count])
    else:
        part.data.view(-1)[:count].copy_(flat[start : start + count])
    if tensor.data.numel() == tensor.ds_numel:  # type: ignore[attr-defined]
        tensor.data.copy_(whole)  # small ones are whole everywhere, besides


def _is_swapped(tensor: Any) -> bool:
    """Whether the float32 copy lies on disk between steps."""
    optimizer = getattr(tensor, "_z3_optimizer", None)
    if optimizer is None or not tensor.requires_grad:
        return False
    group = optimizer.grad_position[optimizer.get_param_id(tensor)][0]
    return bool(optimizer._swappable_optimizer_subgroup(group))


def _write_to_disk(tensor: Any, flat: torch.Tensor) -> None:
    """Change the float32 copy where it is kept.

    What DeepSpeed lets one look at is a buffer that it has given up by then.
    """
    optimizer: Any = tensor._z3_optimizer
    start, count = _span(tensor)
    values, group = optimizer._get_fp32_opt_state_partition(tensor, release_swap_buffers=False)
    values.detach().view(-1)[:count].copy_(flat[start : start + count])
    optimizer._optimizer_states_and_gradient_swap_out(group)


def _of_mapping(mapping: Any) -> Piece:
    start = int(mapping.lp_fragment_address.start)
    return start, mapping.hp_fragment.detach().reshape(-1)


def _of_destroyed(tensor: torch.Tensor, held: Any) -> Piece:
    """The float32 copy, unless the weights went on without it."""
    start, copy = _of_mapping(held)
    weights = tensor.detach().reshape(-1)[start : start + copy.numel()]
    return start, copy if torch.equal(copy.to(weights), weights) else weights


def _of_placeholder(tensor: Any) -> list[Piece]:
    start, count = _span(tensor)
    if count == 0:
        return []
    optimizer = getattr(tensor, "_z3_optimizer", None)
    if optimizer is not None and tensor.requires_grad:
        values = optimizer.get_local_fp32_param(tensor)
        if values is not None:
            return [(start, values.detach().reshape(-1)[:count])]
    return [(start, _at_hand(tensor).detach().reshape(-1)[:count])]


def _span(tensor: Any) -> tuple[int, int]:
    """First element and number of elements that this process has; the last part may be padded."""
    size = int(tensor.ds_tensor.ds_numel)
    start = _partition_rank(tensor) * size
    return start, max(0, min(size, int(tensor.ds_numel) - start))


def _partition_rank(tensor: Any) -> int:
    """Which of the parts is this process's; DeepSpeed writes it down from 0.19.3 on."""
    rank = getattr(tensor, "ds_zero_partition_rank", None)
    return int(dist.get_rank(tensor.ds_process_group) if rank is None else rank)


def _at_hand(tensor: Any) -> torch.Tensor:
    """This process's part of the weights, read from disk if it lies there."""
    part: torch.Tensor = tensor.ds_tensor
    return on_disk.read_part(tensor) if on_disk.is_on_disk(tensor) else part
