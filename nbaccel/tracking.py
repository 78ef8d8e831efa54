"""Trackers of metrics, under the name by which Accelerate's users import them."""

from __future__ import annotations

from nbaccel.train.trackers import (
    GeneralTracker,
    JsonlTracker,
    LoggerType,
    TensorBoardTracker,
    on_main_process,
)

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "TensorBoardTracker",
    "on_main_process",
]
