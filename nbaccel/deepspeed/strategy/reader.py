"""DeepSpeed's :class:`~nbaccel.abc.shards.ShardReader`, as its capability row names it."""

from __future__ import annotations

from nbaccel.deepspeed.strategy.pieces import assign, hold, is_cut, local_pieces, whole_shape
from nbaccel.deepspeed.strategy.stripping import inner_module, plain_state
from nbaccel.deepspeed.strategy.swapping import leave
from nbaccel.deepspeed.strategy.taking_back import remember, take_back
from nbaccel.deepspeed.teardown import forget_groups, tear_down

__all__ = [
    "assign",
    "forget_groups",
    "hold",
    "inner_module",
    "is_cut",
    "leave",
    "local_pieces",
    "plain_state",
    "remember",
    "take_back",
    "tear_down",
    "whole_shape",
]
