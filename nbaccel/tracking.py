"""Trackers of metrics, under the name by which Accelerate's users import them."""

from __future__ import annotations

from collections import ChainMap

from nbaccel.config.enumerations import LoggerType
from nbaccel.train.tracker_classes import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
    on_main_process,
)
from nbaccel.train.trackers import (
    BUILT_IN_TRACKERS,
    REGISTERED_CLASSES,
    JsonlTracker,
    TensorBoardTracker,
    find_trackers as filter_trackers,
    get_available_trackers,
    register_tracker_class,
)

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

LOGGER_TYPE_TO_CLASS: ChainMap[str, type[GeneralTracker]] = ChainMap(
    REGISTERED_CLASSES, BUILT_IN_TRACKERS
)
"""The trackers of this process by name: those registered, and those that nbaccel brings."""
