"""Trackers: where a run's configuration and numbers are written.

``jsonl`` needs nothing, ``tensorboard`` and the services of `tracker_services` need their packages.
Others come from packages that name a class in the entry point group ``nbaccel.trackers``, as
classes that were registered, or as instances of a user's own class.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbaccel._optional import is_installed, require
from nbaccel.abc.place import Place
from nbaccel.config.enumerations import LoggerType
from nbaccel.config.mistakes import closest, shown
from nbaccel.errors import ConfigError, MissingBackend
from nbaccel.train import arrival
from nbaccel.train.tracker_contract import GeneralTracker, flattened, on_main_process, plain
from nbaccel.train.tracker_services import SERVICES

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "TensorBoardTracker",
    "find_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
    "start_trackers",
]

_GROUP = "nbaccel.trackers"
_ALL = "all"


class JsonlTracker(GeneralTracker):
    """One JSON object per line in ``<logging_dir>/<run_name>.jsonl``, readable while it grows.

    A line has ``step``, ``time`` (seconds since 1970) and ``values``; the configuration is a line
    with ``config`` instead, the first of a run. What is no number JSON knows is a text: ``"nan"``.

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
        self._write({"config": plain(values), "time": time.time()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; further arguments are written as they are."""
        self._write({"step": step, "time": time.time(), "values": plain(values), **plain(kwargs)})

    def _write(self, line: dict[str, Any]) -> None:
        self.tracker.write(json.dumps(line, allow_nan=False) + "\n")
        self.tracker.flush()

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if "tracker" in vars(self):
            self.tracker.close()


class TensorBoardTracker(GeneralTracker):
    """TensorBoard's event files in ``<logging_dir>/<run_name>``.

    Args:
        run_name: The run.
        logging_dir: The folder of all runs.
        **kwargs: Of ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._options = kwargs

    @functools.cached_property
    def tracker(self) -> SummaryWriter:
        """The ``SummaryWriter``."""
        require("tensorboard", extra="tensorboard", why="log_with='tensorboard'")
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self.logging_dir), **self._options)

    @property
    def writer(self) -> SummaryWriter:
        """The same, by the name that Accelerate's tracker gives it."""
        return self.tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the configuration under HPARAMS, and keep it in ``hparams.yml`` beside.

        Args:
            values: Hyperparameters by name; nested ones become ``outer.inner``.
        """
        import yaml
        from torch.utils.tensorboard.summary import hparams

        flat = dict(flattened(plain(values)))
        shown_values = {
            k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in flat.items()
        }
        # Not `add_hparams`: it would begin another run, in a subfolder named by the time.
        for summary in hparams(shown_values, {}):  # type: ignore[no-untyped-call]
            self.tracker._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
        self.tracker.flush()
        text = yaml.safe_dump(flat, sort_keys=False)
        (self.logging_dir / "hparams.yml").write_text(text, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dicts of numbers (several curves in one chart).

        Args:
            values: By name; None is passed over.
            step: Of the training.
            **kwargs: Of the writer's ``add_scalar``, ``add_text`` or ``add_scalars``.

        Raises:
            ConfigError: A value is nothing that TensorBoard shows so.
        """
        for name, value in values.items():
            self._log_one(name, plain(value, exact=True), step, kwargs)
        self.tracker.flush()

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> None:
        writer: Any = self.tracker
        if isinstance(value, (int, float)):
            writer.add_scalar(name, value, global_step=step, **kwargs)
        elif isinstance(value, str):
            writer.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, dict):
            writer.add_scalars(name, value, global_step=step, **kwargs)
        elif value is not None:
            raise ConfigError(
                f"log({name!r}: {shown(value)}) is no number, text or dict of numbers, and "
                "TensorBoard shows nothing else this way. Log a number, or use the writer's own "
                "methods: accelerator.get_tracker('tensorboard', unwrap=True).add_histogram(...)."
            )

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            values: By name; several in one array of shape ``[n, channels, height, width]``.
            step: Of the training.
            **kwargs: Of the writer's ``add_images``, such as ``dataformats="NHWC"``.
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
_REGISTERED: dict[str, type[GeneralTracker]] = {}  # of this process, by name


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` find a class by its name, in this process.

    Call it before the `Accelerator` is made; for a launch, inside of the function that is launched.

    Args:
        tracker_class: Its `name` is the name; it is made with the run's name, then the folder,
            where it has `requires_logging_directory`, and with its `init_kwargs`.

    Raises:
        ConfigError: It is no subclass of `GeneralTracker`, or lacks one of these.
    """
    given: Any = tracker_class
    if not (isinstance(given, type) and issubclass(given, GeneralTracker)):
        raise ConfigError(
            f"register_tracker_class({shown(tracker_class)}) is no subclass of GeneralTracker: it "
            "could not be told of metrics. Derive the class from nbaccel.tracking.GeneralTracker."
        )
    lacks = [n for n in ("name", "requires_logging_directory") if not hasattr(tracker_class, n)]
    if lacks or not tracker_class.name:
        raise ConfigError(
            f"register_tracker_class({tracker_class.__name__}) does not define "
            f"{', '.join(lacks) or 'a name'}. It could not be found or started. Define it in the "
            "class."
        )
    if tracker_class.name in {*_own(), *SERVICES, *_REGISTERED}:
        warnings.warn(
            f"register_tracker_class({tracker_class.__name__}) takes the name "
            f"{tracker_class.name!r} from another tracker. Give it another name to keep both.",
            stacklevel=2,
        )
    _REGISTERED[tracker_class.name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(name) for name, there in _availability().items() if there]


def _own() -> dict[str, type[GeneralTracker]]:
    return {tracker.name: tracker for tracker in (JsonlTracker, TensorBoardTracker)}


def _availability() -> dict[str, bool]:
    services = {name: service.is_there() for name, service in SERVICES.items()}
    return {JsonlTracker.name: True, TensorBoardTracker.name: _has_tensorboard(), **services}


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
    asked = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    found: list[_Tracker] = []
    mistakes: list[str] = []
    for item in asked:
        try:
            found += [tracker for tracker in _matching(item) if tracker not in found]
        except ConfigError as error:
            mistakes += error.mistakes
    mistakes += [
        f"log_with={tracker.name!r} writes to a folder, but logging_dir={logging_dir!r}. Its files "
        "would land anywhere. Give Accelerator(project_dir=...), or "
        "ProjectConfiguration(logging_dir=...)."
        for tracker in found
        # An instance was given its folder when it was made.
        if isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return found


def _matching(item: Any) -> list[_Tracker]:
    if isinstance(item, GeneralTracker) or (
        isinstance(item, type) and issubclass(item, GeneralTracker)
    ):
        return [item]
    name = getattr(item, "value", item)  # of an enum, Accelerate's LoggerType for one
    others = {entry.name: entry for entry in importlib.metadata.entry_points(group=_GROUP)}
    classes = {**_own(), **{n: service.tracker for n, service in SERVICES.items()}, **_REGISTERED}
    there = _availability()
    if name == _ALL:
        installed = [classes[n] for n, is_there in there.items() if is_there]
        return [*installed, *(_load(entry) for entry in others.values())]
    if name in classes:
        if name in _REGISTERED or there[name]:
            return [classes[name]]
        _say_left_out(name)
        return []
    if name in others:
        return [_load(others[name])]
    known = [*classes, *others, _ALL]
    raise ConfigError(
        f"log_with={shown(item)} is no tracker that nbaccel knows. Nothing would be logged."
        f"{closest(str(name), known)} There are: {', '.join(known)}. Give one of these, an "
        f"instance of a GeneralTracker, or install a package with an entry point in {_GROUP!r}. A "
        "class given to register_tracker_class is known in the process that did so."
    )


def _say_left_out(name: str) -> None:
    if arrival.rank() != 0:
        return
    package = SERVICES[name].distributions[0] if name in SERVICES else name
    warnings.warn(
        f"log_with={name!r} is left out: {package} is not installed, so nothing is logged there. "
        f"Install it: pip install {package}",
        stacklevel=5,  # past _matching, find_trackers and the Accelerator
    )


def _has_tensorboard() -> bool:
    return is_installed("tensorboard")


def _load(entry: importlib.metadata.EntryPoint) -> type[GeneralTracker]:
    try:
        found = entry.load()
    except ImportError as error:
        raise MissingBackend(
            f"The tracker {entry.name!r} ({entry.value}) cannot be imported: {error}. Install what "
            "it needs, or leave it out of log_with."
        ) from error
    if not (isinstance(found, type) and issubclass(found, GeneralTracker)):
        raise ConfigError(
            f"The tracker {entry.name!r} ({entry.value}) is {shown(found)}, not a subclass of "
            "nbaccel's GeneralTracker. It could not be started. Leave it out of log_with, or mend "
            "the package that brings it."
        )
    return found


def start_trackers(
    found: Iterable[_Tracker],
    place: Place,
    run_name: str,
    *,
    logging_dir: str | Path | None = None,
    config: dict[str, Any] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[GeneralTracker]:
    """Make and start trackers on the processes that are to have them.

    Args:
        found: What :func:`find_trackers` gave.
        place: This process.
        run_name: Name of the run, or project.
        logging_dir: Where trackers write that write to a folder.
        config: The run's configuration, if it is to be stored.
        init_kwargs: Further arguments of the trackers' classes, by name.

    Returns:
        The trackers of this process.
    """
    started: list[GeneralTracker] = []
    for tracker in found:
        if tracker.main_process_only and not place.is_main:
            continue
        if isinstance(tracker, type):
            folder = (logging_dir,) if tracker.requires_logging_directory else ()
            options = (init_kwargs or {}).get(tracker.name, {})
            make: Any = tracker
            tracker = make(run_name, *folder, **options)  # noqa: PLW2901 - class to instance
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
        started.append(tracker)
    return started
