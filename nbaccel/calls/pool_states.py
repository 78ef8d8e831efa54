"""What a pool, and each of its workers, is doing."""

from __future__ import annotations

import enum

__all__ = ["PoolState", "WorkerState"]


class PoolState(enum.Enum):
    """How a pool stands. Only `IDLE` takes work; the others say why not, or start anew."""

    NEW = "no workers yet; the first cell starts them"
    STARTING = "workers are being started"
    IDLE = "workers wait for a cell"
    RUNNING = "workers run a cell"
    BROKEN = "a worker was lost, and the others were ended; the next cell starts new ones"
    STOPPED = "workers were ended on request; the next cell starts new ones"


class WorkerState(enum.Enum):
    """How a worker of a pool stands."""

    IDLE = "waits for a cell"
    RUNNING = "runs a cell"
    STOPPING = "was asked to give the cell up"
    GONE = "has ended"
