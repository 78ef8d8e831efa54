"""Trackers by name: looked up, started, and the classes themselves.

``log_with`` names those of `nbaccel.train.trackers`, those of packages that name a class in the
entry point group ``nbaccel.trackers``, classes that were registered, or is a user's own instance.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError, MissingBackend
from nbaccel.config.enumerations import LoggerType
from nbaccel.config.given_values import closest, shown
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed
from nbaccel.train.trackers import (
    BUILT_IN_TRACKERS,
    SERVICES,
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    JsonlTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    is_there,
    on_main_process,
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

_ENTRY_POINT_GROUP = "nbaccel.trackers"
_EVERY_TRACKER = "all"
_Tracker = GeneralTracker | type[GeneralTracker]
# In this order, because a registered class takes a name over from another tracker.
LOGGER_TYPE_TO_CLASS: ChainMap[str, type[GeneralTracker]] = ChainMap({}, BUILT_IN_TRACKERS)
"""The trackers of this process by name: those registered, and those that nbaccel brings."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` find a class by its name, in this process.

    Call it before the `Accelerator` is made; for a launch, inside of the function that is launched.

    Args:
        tracker_class: Its `name` is the name; it is made with the run's name, then the folder,
            where it has `requires_logging_directory`, and with its `init_kwargs`.

    Raises:
        ConfigError: It is no subclass of `GeneralTracker`, or lacks one of these.
    """
    if not _is_tracker_class(tracker_class):
        raise ConfigError(
            f"register_tracker_class({shown(tracker_class)}) is no subclass of GeneralTracker: it "
            "could not receive metrics. Derive the class from nbaccel.tracking.GeneralTracker."
        )
    needed = ("name", "requires_logging_directory")
    missing_attributes = [name for name in needed if not hasattr(tracker_class, name)]
    if missing_attributes or not tracker_class.name:
        raise ConfigError(
            f"register_tracker_class({tracker_class.__name__}) does not define "
            f"{', '.join(missing_attributes) or 'a name'}. It could not be found or started. "
            "Define it in the class."
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"register_tracker_class({tracker_class.__name__}) takes the name "
            f"{tracker_class.name!r} from another tracker. Give it another name to keep both.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def _is_tracker_class(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, GeneralTracker)


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(name) for name in BUILT_IN_TRACKERS if is_there(name)]


def filter_trackers(log_with: Any, logging_dir: str | Path | None = None) -> list[_Tracker]:
    """Look up trackers before anything is started.

    Args:
        log_with: A name, ``"all"`` (every one that is installed), a tracker or a tracker's class,
            or several of them; None for none. One that nbaccel knows and that is not installed is
            left out, with a warning on process 0.
        logging_dir: Where trackers write that write to a folder.

    Returns:
        Classes for names and instances as given, each once, in the order given.

    Raises:
        ConfigError: A name is unknown, or there is no `logging_dir` for one that needs it; all
            mistakes together.
        MissingBackend: What an entry point names cannot be imported.
    """
    if log_with is None:
        return []
    requested = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    matches: list[_Tracker] = []
    mistakes: list[str] = []
    for item in requested:
        try:
            # A tracker that is named twice, or also by `all`, is started once.
            matches += [tracker for tracker in _match_trackers(item) if tracker not in matches]
        except ConfigError as error:
            mistakes += error.mistakes
    mistakes += [
        f"log_with={tracker.name!r} writes to a folder, but logging_dir={logging_dir!r}. It is "
        "unknown where its files belong. Give Accelerator(project_dir=...), or "
        "ProjectConfiguration(logging_dir=...)."
        for tracker in matches
        # An instance was given its folder when it was made.
        if isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return matches


def _match_trackers(item: Any) -> list[_Tracker]:
    if isinstance(item, GeneralTracker) or _is_tracker_class(item):
        return [item]
    # A member of an enumeration stands for its value: Accelerate's LoggerType is one.
    tracker_name = getattr(item, "value", item)
    found = importlib.metadata.entry_points(group=_ENTRY_POINT_GROUP)
    entry_points = {entry_point.name: entry_point for entry_point in found}
    if tracker_name == _EVERY_TRACKER:
        installed = [LOGGER_TYPE_TO_CLASS[name] for name in BUILT_IN_TRACKERS if is_there(name)]
        return [*installed, *map(_load_entry_point, entry_points.values())]
    if tracker_name in LOGGER_TYPE_TO_CLASS:
        tracker_class = LOGGER_TYPE_TO_CLASS[tracker_name]
        is_registered = tracker_class is not BUILT_IN_TRACKERS.get(tracker_name)
        if is_registered or is_there(tracker_name):
            return [tracker_class]
        _warn_left_out(tracker_name)
        return []
    if tracker_name in entry_points:
        return [_load_entry_point(entry_points[tracker_name])]
    known_names = [*LOGGER_TYPE_TO_CLASS, *entry_points, _EVERY_TRACKER]
    raise ConfigError(
        f"log_with={shown(item)} is not a known tracker. Nothing would be "
        f"logged.{closest(str(tracker_name), known_names)} There are: {', '.join(known_names)}. "
        "Give one of these, an instance of a GeneralTracker, or install a package with an entry "
        f"point in {_ENTRY_POINT_GROUP!r}. A class given to register_tracker_class is known in "
        "the process that did so."
    )


def _warn_left_out(tracker_name: str) -> None:
    if distributed.rank() != 0:
        return
    service = SERVICES.get(tracker_name)
    package_name = service.distributions[0] if service and service.distributions else tracker_name
    warnings.warn(
        f"log_with={tracker_name!r} is left out: {package_name} is not installed, so nothing is "
        f"logged there. Install it: pip install {package_name}",
        stacklevel=5,  # past _match_trackers, filter_trackers and the Accelerator
    )


def _load_entry_point(entry_point: importlib.metadata.EntryPoint) -> type[GeneralTracker]:
    try:
        loaded_class: Any = entry_point.load()
    except ImportError as error:
        raise MissingBackend(
            f"The tracker {entry_point.name!r} ({entry_point.value}) cannot be imported: {error}. "
            "Install what it needs, or leave it out of log_with."
        ) from error
    if not _is_tracker_class(loaded_class):
        raise ConfigError(
            f"The tracker {entry_point.name!r} ({entry_point.value}) is {shown(loaded_class)}, "
            "not a subclass of nbaccel's GeneralTracker. It could not be started. Leave it out of "
            "log_with, or correct the package that brings it."
        )
    return loaded_class  # type: ignore[no-any-return]


def start_trackers(
    requested_trackers: Iterable[_Tracker],
    place: Place,
    run_name: str,
    *,
    logging_dir: str | Path | None = None,
    config: dict[str, Any] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[GeneralTracker]:
    """Make and start trackers on the processes that are to have them."""
    started_trackers: list[GeneralTracker] = []
    for requested in requested_trackers:
        if requested.main_process_only and not place.is_main:
            continue
        tracker: Any = requested
        if isinstance(requested, type):
            arguments = (logging_dir,) if requested.requires_logging_directory else ()
            tracker = tracker(run_name, *arguments, **(init_kwargs or {}).get(requested.name, {}))
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
        started_trackers.append(tracker)
    return started_trackers


def find_started_tracker(
    started_trackers: Sequence[GeneralTracker], tracker_name: str, *, unwrap: bool
) -> Any:
    """One of the started trackers; see `Accelerator.get_tracker`."""
    for tracker in started_trackers:
        if tracker.name == tracker_name:
            return getattr(tracker, "tracker", tracker) if unwrap else tracker
    if not started_trackers:
        return GeneralTracker(_blank=True)
    raise ConfigError(
        f"get_tracker({tracker_name!r}) finds none: started are "
        f"{[tracker.name for tracker in started_trackers]}. Give its name to "
        "Accelerator(log_with=...), before init_trackers."
    )


def logger_type_of(tracker: _Tracker) -> LoggerType | str | GeneralTracker:
    """What `Accelerator.log_with` shows for a requested tracker: its name, or the given object."""
    if not isinstance(tracker, type):
        return tracker
    return LoggerType(tracker.name) if tracker.name in LoggerType else tracker.name
