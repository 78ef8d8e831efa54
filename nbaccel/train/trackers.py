"""Trackers: where a run's configuration and numbers are written.

``jsonl`` needs nothing, ``tensorboard`` and the services of `tracker_classes` need their packages.
Others come from packages that name a class in the entry point group ``nbaccel.trackers``, as
classes that were registered, or as instances of a user's own class.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError, MissingBackend, PlatformUnsupported
from nbaccel.base.optional_packages import is_installed, require
from nbaccel.config.enumerations import LoggerType
from nbaccel.config.given_values import closest, shown
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed
from nbaccel.train.tracker_classes import (
    SERVICE_TRACKERS,
    GeneralTracker,
    distributions_of,
    flatten_values,
    is_service_there,
    on_main_process,
    plain_value,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = [
    "BUILT_IN_TRACKERS",
    "REGISTERED_CLASSES",
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "TensorBoardTracker",
    "find_started_tracker",
    "find_trackers",
    "get_available_trackers",
    "logger_type_of",
    "on_main_process",
    "register_tracker_class",
    "start_trackers",
]

_ENTRY_POINT_GROUP = "nbaccel.trackers"
_EVERY_TRACKER = "all"


class JsonlTracker(GeneralTracker):
    """One JSON object per line in ``<logging_dir>/<run_name>.jsonl``, readable while it grows.

    A line has ``step``, ``time`` (seconds since 1970) and ``values``; the configuration is a line
    with ``config`` instead, the first of a run. Numbers that JSON lacks are texts: ``"nan"``.

    Args:
        run_name: The run; an existing file is continued.
        logging_dir: The folder.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.jsonl"

    @functools.cached_property
    def tracker(self) -> IO[str]:
        """The file, open for appending."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("a", encoding="utf-8")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self._write_line({"config": plain_value(values), "time": time.time()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; further arguments are written as they are."""
        line = {"step": step, "time": time.time(), "values": plain_value(values)}
        self._write_line({**line, **plain_value(kwargs)})

    def _write_line(self, line: dict[str, Any]) -> None:
        # `allow_nan=False`: NaN is no valid JSON, and `plain_value` has turned it into text.
        self.tracker.write(json.dumps(line, allow_nan=False) + "\n")
        # Each line at once, so that the file can be followed and survives a killed process.
        self.tracker.flush()

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        # `cached_property` puts it there: asking for it would open a file just to close it.
        if "tracker" in vars(self):
            self.tracker.close()


class TensorBoardTracker(GeneralTracker):
    """TensorBoard's event files in ``<logging_dir>/<run_name>``.

    Args:
        run_name: The run.
        logging_dir: The folder of all runs.
        **kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._writer_options = kwargs

    @functools.cached_property
    def tracker(self) -> SummaryWriter:
        """The ``SummaryWriter``."""
        require("tensorboard", extra="tensorboard", why="log_with='tensorboard'")
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self.logging_dir), **self._writer_options)

    @property
    def writer(self) -> SummaryWriter:
        """The same, by the name that Accelerate's tracker gives it."""
        return self.tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the configuration under HPARAMS, and keep it in ``hparams.yml``, too.

        Args:
            values: Hyperparameters by name; nested ones become ``outer.inner``.
        """
        import yaml
        from torch.utils.tensorboard.summary import hparams

        flat_values = dict(flatten_values(plain_value(values)))
        shown_values = {
            name: value if isinstance(value, (bool, int, float)) else str(value)
            for name, value in flat_values.items()
        }
        # Not `add_hparams`, which would write another run into a subfolder named by the time.
        for summary in hparams(shown_values, {}):  # type: ignore[no-untyped-call]
            self._file_writer().add_summary(summary)
        self.tracker.flush()
        yaml_text = yaml.safe_dump(flat_values, sort_keys=False)
        (self.logging_dir / "hparams.yml").write_text(yaml_text, encoding="utf-8")

    def _file_writer(self) -> Any:
        # Seen in torch 2.6 to 2.15: no public method adds a summary that is made already.
        writer = getattr(self.tracker, "_get_file_writer", None)
        if writer is None:
            installed = importlib.metadata.version("torch")
            raise PlatformUnsupported(
                f"torch {installed} has no SummaryWriter._get_file_writer: TensorBoard's HPARAMS "
                "cannot be written. Call init_trackers() without config=, or use torch 2.6 to 2.15."
            )
        return writer()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dicts of numbers (several curves in one chart).

        Args:
            values: By name; None is passed over.
            step: The training step.
            **kwargs: Arguments of the writer's ``add_scalar``, ``add_text`` or ``add_scalars``.

        Raises:
            ConfigError: A value is nothing that TensorBoard shows so.
        """
        for name, logged_value in values.items():
            self._log_one(name, plain_value(logged_value, keep_infinite=True), step, kwargs)
        self.tracker.flush()

    def _log_one(self, name: str, value: Any, step: int | None, options: dict[str, Any]) -> None:
        writer: Any = self.tracker
        if isinstance(value, (int, float)):
            writer.add_scalar(name, value, global_step=step, **options)
        elif isinstance(value, str):
            writer.add_text(name, value, global_step=step, **options)
        elif isinstance(value, dict):
            writer.add_scalars(name, value, global_step=step, **options)
        elif value is not None:
            raise ConfigError(
                f"log({name!r}: {shown(value)}) is no number, text or dict of "
                "numbers, and TensorBoard shows nothing else this way. Log a number, or use the "
                "writer's own methods: accelerator.get_tracker('tensorboard', "
                "unwrap=True).add_histogram(...)."
            )

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            values: By name; several in one array of shape ``[n, channels, height, width]``.
            step: The training step.
            **kwargs: Arguments of ``add_images``, such as ``dataformats="NHWC"``.
        """
        writer: Any = self.tracker
        for name, images in values.items():
            writer.add_images(name, images, global_step=step, **kwargs)
        self.tracker.flush()

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if "tracker" in vars(self):
            self.tracker.close()


# ------------------------------------------------------------------------- choosing and starting

_Tracker = GeneralTracker | type[GeneralTracker]
REGISTERED_CLASSES: dict[str, type[GeneralTracker]] = {}
"""Classes that log_with finds by name in this process."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` find a class by its name, in this process.

    Call it before the `Accelerator` is made; for a launch, inside of the function that is launched.

    Args:
        tracker_class: Its `name` is the name; it is made with the run's name, then the folder,
            where it has `requires_logging_directory`, and with its `init_kwargs`.

    Raises:
        ConfigError: It is no subclass of `GeneralTracker`, or lacks one of these.
    """
    any_class: Any = tracker_class
    if not (isinstance(any_class, type) and issubclass(any_class, GeneralTracker)):
        raise ConfigError(
            f"register_tracker_class({shown(tracker_class)}) is no subclass of GeneralTracker: it "
            "could not receive metrics. Derive the class from nbaccel.tracking.GeneralTracker."
        )
    missing_attributes = [
        attribute_name
        for attribute_name in ("name", "requires_logging_directory")
        if not hasattr(tracker_class, attribute_name)
    ]
    if missing_attributes or not tracker_class.name:
        raise ConfigError(
            f"register_tracker_class({tracker_class.__name__}) does not define "
            f"{', '.join(missing_attributes) or 'a name'}. It could not be found or started. "
            "Define it in the class."
        )
    if tracker_class.name in {*BUILT_IN_TRACKERS, *REGISTERED_CLASSES}:
        warnings.warn(
            f"register_tracker_class({tracker_class.__name__}) takes the name "
            f"{tracker_class.name!r} from another tracker. Give it another name to keep both.",
            stacklevel=2,
        )
    REGISTERED_CLASSES[tracker_class.name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(name) for name, is_there in _tracker_availability().items() if is_there]


BUILT_IN_TRACKERS: dict[str, type[GeneralTracker]] = {
    JsonlTracker.name: JsonlTracker,
    TensorBoardTracker.name: TensorBoardTracker,
    **SERVICE_TRACKERS,
}
"""The trackers that nbaccel brings, by name."""


def _tracker_availability() -> dict[str, bool]:
    return {
        name: is_service_there(name) if name in SERVICE_TRACKERS else _is_own_there(name)
        for name in BUILT_IN_TRACKERS
    }


def _is_own_there(name: str) -> bool:
    return name != TensorBoardTracker.name or is_installed("tensorboard")


def find_trackers(log_with: Any, logging_dir: str | Path | None = None) -> list[_Tracker]:
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
    if isinstance(item, GeneralTracker) or (
        isinstance(item, type) and issubclass(item, GeneralTracker)
    ):
        return [item]
    # A member of an enumeration stands for its value: Accelerate's LoggerType is one.
    tracker_name = getattr(item, "value", item)
    entry_points = {
        entry_point.name: entry_point
        for entry_point in importlib.metadata.entry_points(group=_ENTRY_POINT_GROUP)
    }
    # In this order, because a registered class takes a name over from another tracker.
    classes = {**BUILT_IN_TRACKERS, **REGISTERED_CLASSES}
    availability = _tracker_availability()
    if tracker_name == _EVERY_TRACKER:
        installed = [classes[name] for name, is_there in availability.items() if is_there]
        return [*installed, *map(_load_entry_point, entry_points.values())]
    if tracker_name in classes:
        if tracker_name in REGISTERED_CLASSES or availability[tracker_name]:
            return [classes[tracker_name]]
        _warn_left_out(tracker_name)
        return []
    if tracker_name in entry_points:
        return [_load_entry_point(entry_points[tracker_name])]
    known_names = [*classes, *entry_points, _EVERY_TRACKER]
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
    package_name = distributions_of(tracker_name)[0]
    warnings.warn(
        f"log_with={tracker_name!r} is left out: {package_name} is not installed, so nothing is "
        f"logged there. Install it: pip install {package_name}",
        stacklevel=5,  # past _match_trackers, find_trackers and the Accelerator
    )


def _load_entry_point(entry_point: importlib.metadata.EntryPoint) -> type[GeneralTracker]:
    try:
        loaded_class = entry_point.load()
    except ImportError as error:
        raise MissingBackend(
            f"The tracker {entry_point.name!r} ({entry_point.value}) cannot be imported: {error}. "
            "Install what it needs, or leave it out of log_with."
        ) from error
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, GeneralTracker)):
        raise ConfigError(
            f"The tracker {entry_point.name!r} ({entry_point.value}) is {shown(loaded_class)}, "
            "not a subclass of nbaccel's GeneralTracker. It could not be started. Leave it out of "
            "log_with, or correct the package that brings it."
        )
    return loaded_class


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
    for tracker in requested_trackers:
        if tracker.main_process_only and not place.is_main:
            continue
        if isinstance(tracker, type):
            arguments = (logging_dir,) if tracker.requires_logging_directory else ()
            tracker_options = (init_kwargs or {}).get(tracker.name, {})
            tracker_class: Any = tracker
            tracker = tracker_class(run_name, *arguments, **tracker_options)  # noqa: PLW2901 - class to instance
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
