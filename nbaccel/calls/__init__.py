"""Calls on workers: launches and pools.

A pool's workers live on between cells. Names are imported when they are first used: what only reads
a cell's source imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbaccel.calls.pool import CellResult, Pool
    from nbaccel.calls.pool_states import PoolState, WorkerState

__all__ = ["CellResult", "Pool", "PoolState", "WorkerState"]

_HOMES = {
    "CellResult": "nbaccel.calls.pool",
    "Pool": "nbaccel.calls.pool",
    "PoolState": "nbaccel.calls.pool_states",
    "WorkerState": "nbaccel.calls.pool_states",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
