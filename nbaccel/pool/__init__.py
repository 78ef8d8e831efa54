"""The pool: workers that live on between cells, with a namespace of their own.

Its names are imported when they are first used: what only reads a cell's source imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbaccel.pool.states import PoolState, WorkerState
    from nbaccel.pool.worker_pool import CellResult, Pool

__all__ = ["CellResult", "Pool", "PoolState", "WorkerState"]

_HOMES = {
    "CellResult": "nbaccel.pool.worker_pool",
    "Pool": "nbaccel.pool.worker_pool",
    "PoolState": "nbaccel.pool.states",
    "WorkerState": "nbaccel.pool.states",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
