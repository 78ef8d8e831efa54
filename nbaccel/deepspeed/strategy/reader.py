"""DeepSpeed's :class:`~nbaccel.abc.ShardReader`, as its capability row names it."""

from __future__ import annotations

from nbaccel.deepspeed.strategy.local_shards import assign, hold, is_cut, local_pieces, whole_shape
from nbaccel.deepspeed.strategy.nvme_swapping import leave
from nbaccel.deepspeed.strategy.restore import inner_module, plain_state, remember, take_back
from nbaccel.deepspeed.strategy.zero_init import building_whole
from nbaccel.deepspeed.teardown import forget_groups, tear_down
from nbaccel.deepspeed.weights.placeholders import check_whole

__all__ = [
    "assign",
    "building_whole",
    "check_whole",
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
