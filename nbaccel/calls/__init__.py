"""Calls on workers: launches and pools.

A pool's workers live on between cells. Names are imported when they are first used: what only reads
a cell's source imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from nbaccel.calls.pool import CellResult, Pool
    from nbaccel.calls.pool_planning import PoolState, WorkerState

__all__ = ["CellResult", "Pool", "PoolState", "WorkerState"]

__getattr__ = lazy_names(
    __name__,
    {
        "CellResult": "nbaccel.calls.pool",
        "Pool": "nbaccel.calls.pool",
        "PoolState": "nbaccel.calls.pool_planning",
        "WorkerState": "nbaccel.calls.pool_planning",
    },
)
