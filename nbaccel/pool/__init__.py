"""The pool: workers that live on between cells, with a namespace of their own."""

from nbaccel.pool.pool import CellResult, Pool
from nbaccel.pool.states import PoolState, WorkerState

__all__ = ["CellResult", "Pool", "PoolState", "WorkerState"]
