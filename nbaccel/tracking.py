"""Trackers: they write a run's configuration and numbers; found by name, and started.

``log_with`` names those below, classes that were registered, or is a user's own instance. ``jsonl``
needs nothing, the others their packages, which are imported when a run begins. Arguments of
services are those of their packages, as Accelerate's users write them in ``init_kwargs``; what a
service cannot show is left out, with one warning.
"""

from __future__ import annotations

import functools
import json
import math
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import installed_version, is_installed, require
from nbaccel.config.enumerations import LoggerType
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import closest, dotted_items, shown
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


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


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tracker's method run on process 0 alone; elsewhere the call returns None.

    Where the tracker's `main_process_only` is False it runs everywhere.
    """

    @functools.wraps(function)
    def wrapped_method(tracker: Any, *args: Any, **kwargs: Any) -> Any:
        # Read in each call, because an instance may override the value of its class.
        everywhere = not getattr(tracker, "main_process_only", True)
        return function(tracker, *args, **kwargs) if everywhere or distributed.rank() == 0 else None

    return wrapped_method


class GeneralTracker:
    """Base class of all trackers.

    A subclass has the class attributes `name` and `requires_logging_directory` and the property
    `tracker`, and calls ``super().__init__()``.

    Args:
        _blank: A tracker that does nothing, for processes that have none.

    Attributes:
        name: Its name in `log_with` and `get_tracker`.
        requires_logging_directory: Whether it writes to a folder.
        main_process_only: Whether only process 0 has one.

    Raises:
        NotImplementedError: The class lacks one of them; it lists which.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        needed_attributes = () if _blank else ("name", "requires_logging_directory", "tracker")
        # Looked for in the class: on the instance `tracker` would be evaluated before `start`.
        missing_attributes = [name for name in needed_attributes if not hasattr(type(self), name)]
        if missing_attributes:
            raise NotImplementedError(
                f"The tracker {type(self).__name__} does not define "
                f"{', '.join(missing_attributes)}. It could be neither named nor started. Define "
                "them in its class."
            )

    def start(self) -> None:
        """Begin to track; called once, on the processes that use the tracker."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's configuration: hyperparameters by name."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers or texts by name, at a training step."""

    def finish(self) -> None:
        """Write everything and close; nothing is logged afterwards."""


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
        self._write_line({"config": _plain_value(values), "time": time.time()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; further arguments are written as they are."""
        line = {"step": step, "time": time.time(), "values": _plain_value(values)}
        self._write_line({**line, **_plain_value(kwargs)})

    def _write_line(self, line: dict[str, Any]) -> None:
        # `allow_nan=False`: NaN is no valid JSON, and `_plain_value` has turned it into text.
        self.tracker.write(json.dumps(line, allow_nan=False) + "\n")
        # Each line at once, so that the file can be followed and survives a killed process.
        self.tracker.flush()

    def finish(self) -> None:
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

    # By the name that Accelerate's tracker gives it.
    writer = property(attrgetter("tracker"))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the configuration under HPARAMS, and keep it in ``hparams.yml``, too.

        Nested values become ``outer.inner``.
        """
        import yaml
        from torch.utils.tensorboard.summary import hparams

        flat = dict(dotted_items(_plain_value(values)))
        as_is = (bool, int, float)
        shown_values = {n: it if isinstance(it, as_is) else str(it) for n, it in flat.items()}
        # Not `add_hparams`, which would write another run into a subfolder named by the time.
        for summary in hparams(shown_values, {}):  # type: ignore[no-untyped-call]
            self.writer.file_writer.add_summary(summary)
        self.tracker.flush()
        yaml_text = yaml.safe_dump(flat, sort_keys=False)
        (self.logging_dir / "hparams.yml").write_text(yaml_text, encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dicts of numbers (curves in one chart); None is left out."""
        for name, logged_value in values.items():
            value = _plain_value(logged_value, keep_infinite=True)
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            elif value is not None:
                raise ConfigError(
                    f"log({name!r}: {shown(value)}) is no number, text or dict of numbers, and "
                    "TensorBoard shows nothing else this way. Log a number, or use its writer: "
                    "accelerator.get_tracker('tensorboard', unwrap=True).add_histogram(...)."
                )
        self.tracker.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images by name; several in one array of shape ``[n, channels, height, width]``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)
        self.tracker.flush()

    def finish(self) -> None:
        if "tracker" in vars(self):
            self.tracker.close()


class _Service(NamedTuple):
    """How a run of a service begins, what is told its configuration, and how it ends."""

    begin: str  # a function of the package; its result is the run
    project: str  # its argument for the run's name; empty where it has none
    configure: str  # a method, looked up from the tracker
    end: str  # another one
    # Names of the package for pip, where they are not the module's; any one is enough.
    distributions: tuple[str, ...] = ()


SERVICES = {
    "aim": _Service("Run", "", "", "run.close"),
    "clearml": _Service("", "", "run.connect_configuration", "run.close"),
    "comet_ml": _Service("start", "project_name", "run.log_parameters", "run.end", ("comet-ml",)),
    "dvclive": _Service("Live", "", "run.log_params", "run.end"),
    "mlflow": _Service("", "", "", "package.end_run", ("mlflow", "mlflow-skinny")),
    "swanlab": _Service("init", "project", "package.config.update", "run.finish"),
    "trackio": _Service("init", "project", "run.config.update", "run.finish"),
    "wandb": _Service("init", "project", "run.config.update", "run.finish"),
}
"""By the name that `log_with` gives them, which is also that of the module."""


class ServiceTracker(GeneralTracker):
    """A run of a service: `SERVICES` says what its package calls each step, a subclass the rest.

    `run_name` is the project's; further arguments are those of what begins a run.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The service's object for a run, also by Accelerate's name for it; None before `start`."""
        return self.run

    @property
    def package(self) -> Any:
        """The service's package, imported when it is first used."""
        return import_module(self.name)

    def start(self) -> None:
        service = SERVICES[self.name]
        names = {service.project: self.run_name} if service.project else {}
        self.run = getattr(self.package, service.begin)(**names, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        attrgetter(SERVICES[self.name].configure)(self)(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; anything that the service's ``log`` takes."""
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        if self.run is not None:
            attrgetter(SERVICES[self.name].end)(self)()

    def _shown_values(
        self, values: Mapping[str, Any], shown_types: tuple[type, ...]
    ) -> Iterator[tuple[str, Any]]:
        """Names and values that the service shows; the others are left out, with a warning."""
        for name, given in values.items():
            # A tensor of one number is no Real; as a Python number the service can show it.
            value = _plain_value(given, keep_infinite=True) if hasattr(given, "dtype") else given
            if isinstance(value, shown_types):
                yield name, value
            else:
                warnings.warn(
                    f"log({name!r}: ...) is left out: {self.name} shows no {type(given).__name__} "
                    f"this way. Use accelerator.get_tracker({self.name!r}, unwrap=True).",
                    stacklevel=4,  # past the tracker's log and Accelerator.log
                )


class AimTracker(ServiceTracker):
    """A run of Aim.

    Args:
        run_name: Its name.
        logging_dir: Folder of Aim's repository.
        **kwargs: Arguments of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **{"repo": str(logging_dir), **kwargs})
        self.aim_repo_path = logging_dir

    writer = ServiceTracker.tracker

    def start(self) -> None:
        super().start()
        self.run.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; anything that ``Run.track`` takes."""
        for name, logged_value in values.items():
            self.run.track(logged_value, name=name, step=step, **kwargs)

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Write images by name, each alone or with its caption in a tuple.

        `kwargs` has further arguments: ``aim_image`` of ``aim.Image``, ``track`` of ``Run.track``.
        """
        options = kwargs or {}
        for image_name, given in values.items():
            content, caption = given if isinstance(given, tuple) else (given, "")
            image = self.package.Image(content, caption=caption, **options.get("aim_image", {}))
            self.run.track(image, name=image_name, step=step, **options.get("track", {}))


class MLflowTracker(ServiceTracker):
    """A run of MLflow.

    Args:
        experiment_name: Its experiment, made if there is none (``MLFLOW_EXPERIMENT_NAME``).
        logging_dir: Where a new experiment keeps files; None leaves it to MLflow.
        run_id: The run to continue (``MLFLOW_RUN_ID``); None begins one.
        tags: Of the run, as a dict or its JSON (``MLFLOW_TAGS``).
        nested_run: Whether it is part of the run that is active (``MLFLOW_NESTED_RUN``).
        run_name: Name of a new run.
        description: Description of the run.

    What the environment says wins, as with Accelerate.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name or "")
        self.experiment_name = env.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = env.read("MLFLOW_RUN_ID") or run_id
        given_tags = env.read("MLFLOW_TAGS") or tags
        self.tags = json.loads(given_tags) if isinstance(given_tags, str) else given_tags
        variable = env.flag("MLFLOW_NESTED_RUN")
        self.nested_run = bool(nested_run if variable is None else variable)
        self.description = description

    active_run = ServiceTracker.tracker

    def start(self) -> None:
        experiment = self.package.get_experiment_by_name(self.experiment_name)
        if experiment is None:
            location = None if self.logging_dir is None else str(self.logging_dir)
            number = self.package.create_experiment(self.experiment_name, location, self.tags)
        else:
            number = experiment.experiment_id
        self.run = self.package.start_run(
            run_id=self.run_id,
            experiment_id=str(number),
            run_name=self.run_name or None,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration, as far as MLflow takes texts of such a length."""
        # MLflow raised its limits over the years, so those of the installed version are read.
        limits: Any = import_module("mlflow.utils.validation")
        longest = limits.MAX_PARAM_VAL_LENGTH
        fitting = {name: value for name, value in values.items() if len(str(value)) <= longest}
        if left_out := sorted(values.keys() - fitting.keys()):
            warnings.warn(
                f"MLflow takes values of at most {longest} letters: "
                f"{', '.join(left_out)} are left out of the configuration. Shorten them.",
                stacklevel=4,
            )
        # MLflow refuses a request with more parameters than this.
        for first in range(0, len(fitting), limits.MAX_PARAMS_TAGS_PER_BATCH):
            batch = list(fitting.items())[first : first + limits.MAX_PARAMS_TAGS_PER_BATCH]
            self.package.log_params(dict(batch))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers alone."""
        self.package.log_metrics(dict(self._shown_values(values, (Real,))), step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        self.package.log_figure(figure, artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        self.package.log_artifacts(local_dir, artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        self.package.log_artifact(local_path, artifact_path)


class DVCLiveTracker(ServiceTracker):
    """DVCLive.

    Args:
        run_name: Not used: DVCLive names by folder.
        live: A ``dvclive.Live`` to continue.
        **kwargs: Arguments of ``dvclive.Live``.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self.run = live

    live = ServiceTracker.tracker

    def start(self) -> None:
        if self.run is None:
            super().start()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers and texts."""
        if step is not None:
            # Otherwise dvclive counts steps by itself.
            self.run.step = step
        for name, logged_value in self._shown_values(values, (Real, str)):
            self.run.log_metric(name, logged_value, **kwargs)
        self.run.next_step()


class TrackioTracker(ServiceTracker):
    """A run of Trackio; arguments are those of ``trackio.init``."""

    name = "trackio"


def _log_image_lists(
    self: ServiceTracker, values: dict[str, Any], step: int | None = None, **kwargs: Any
) -> None:
    """Write lists of images, as arrays or of PIL, by name."""
    for name, images in values.items():
        self.log({name: [self.package.Image(image) for image in images]}, step=step, **kwargs)


class SwanLabTracker(ServiceTracker):
    """A run of SwanLab; arguments are those of ``swanlab.init``."""

    name = "swanlab"
    log_images = _log_image_lists


class WandBTracker(ServiceTracker):
    """A run of Weights & Biases; arguments are those of ``wandb.init``."""

    name = "wandb"
    log_images = _log_image_lists

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        # wandb refuses other values for a run that is continued, unless this is given.
        self.run.config.update(values, allow_val_change=True)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table, of rows and the names of their columns, or of a data frame."""
        table = self.package.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class CometMLTracker(ServiceTracker):
    """An experiment of Comet; arguments are those of ``comet_ml.start``."""

    name = "comet_ml"

    writer = ServiceTracker.tracker

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers, texts, and dicts of numbers."""
        if step is not None:
            self.run.set_step(step)
        for name, logged_value in self._shown_values(values, (Real, str, dict)):
            if isinstance(logged_value, str):
                self.run.log_other(name, logged_value, **kwargs)
            elif isinstance(logged_value, dict):
                self.run.log_metrics(logged_value, step=step, **kwargs)
            else:
                self.run.log_metric(name, logged_value, step=step, **kwargs)


class ClearMLTracker(ServiceTracker):
    """A task of ClearML; arguments are those of ``Task.init``.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` win over `run_name`; a task that exists already
    is continued, and left open.
    """

    name = "clearml"

    def start(self) -> None:
        task_class = self.package.Task
        # A task of the user's is not closed in `finish`.
        self._existing_task = task_class.current_task()
        names = {
            "project_name": env.read("CLEARML_PROJECT") or self.run_name,
            "task_name": env.read("CLEARML_TASK") or self.run_name,
        }
        self.run = self._existing_task or task_class.init(**{**names, **self.init_kwargs})

    task = ServiceTracker.tracker

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers; ``train_``, ``eval_`` and ``test_`` before a name make series of one plot.

        Without a step a number stands alone.
        """
        logger = self.run.get_logger()
        for name, value in self._shown_values(values, (Real,)):
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                logger.report_scalar(**_plot_names(name), value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images, as arrays or of PIL, by name."""
        logger = self.run.get_logger()
        for name, image in values.items():
            logger.report_image(**_plot_names(name), iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table, of rows and the names of their columns, or of a data frame."""
        rows = [columns, *(data or ())] if columns else data
        table_content = rows if dataframe is None else dataframe
        self.run.get_logger().report_table(
            **_plot_names(table_name), table_plot=table_content, iteration=step, **kwargs
        )

    def finish(self) -> None:
        if self.run is not None and self._existing_task is None:
            super().finish()


def _plot_names(value_name: str) -> dict[str, str]:
    series_name, _, title = value_name.partition("_")
    if title and series_name in ("eval", "test", "train"):
        return {"title": title, "series": series_name}
    return {"title": value_name, "series": "train"}


def _plain_value(any_value: Any, *, keep_infinite: bool = False) -> Any:
    """A value that JSON can hold: tensors and numpy numbers as Python's, the rest as text."""
    plain = functools.partial(_plain_value, keep_infinite=keep_infinite)
    if isinstance(any_value, Mapping):
        return {str(name): plain(item) for name, item in any_value.items()}
    if isinstance(any_value, (list, tuple, set, frozenset)):
        return list(map(plain, any_value))
    if hasattr(any_value, "tolist") and hasattr(any_value, "dtype"):  # of torch or numpy
        # One number in an array of any shape counts as that number.
        is_one = math.prod(any_value.shape) == 1
        return plain(any_value.item() if is_one else any_value.tolist())
    # JSON has no NaN and no infinity.
    if isinstance(any_value, float) and not math.isfinite(any_value):
        return any_value if keep_infinite else str(any_value)
    if any_value is None or type(any_value) in {bool, int, float, str}:
        return any_value
    return str(any_value)


BUILT_IN_TRACKERS: dict[str, type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        *(JsonlTracker, TensorBoardTracker, WandBTracker, TrackioTracker, CometMLTracker),
        *(AimTracker, MLflowTracker, ClearMLTracker, DVCLiveTracker, SwanLabTracker),
    )
}
"""By the name that `log_with` gives them."""


def is_there(name: str) -> bool:
    """Whether a tracker's package is installed; a folder of its name is none."""
    if name in SERVICES:
        distributions = SERVICES[name].distributions or (name,)
        return is_installed(name) and any(map(installed_version, distributions))
    return name != TensorBoardTracker.name or is_installed(name)


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
    is_tracker = GeneralTracker in getattr(tracker_class, "__mro__", ())
    if not is_tracker or not hasattr(tracker_class, "name"):
        raise ConfigError(
            f"register_tracker_class({shown(tracker_class)}) is no subclass of GeneralTracker that "
            "defines a name: it could not be found, or not receive metrics. Derive the class from "
            "nbaccel.tracking.GeneralTracker, and define name in it."
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"register_tracker_class({tracker_class.__name__}) takes the name "
            f"{tracker_class.name!r} from another tracker. Give it another name to keep both.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


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
        ConfigError: Names are unknown, or lack a `logging_dir` they need; all mistakes together.
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
    refuse_mistakes(mistakes)
    return matches


def _match_trackers(item: Any) -> list[_Tracker]:
    if GeneralTracker in getattr(item if isinstance(item, type) else type(item), "__mro__", ()):
        return [item]
    # A member of an enumeration stands for its value: Accelerate's LoggerType is one.
    tracker_name = getattr(item, "value", item)
    if tracker_name == "all":
        return [LOGGER_TYPE_TO_CLASS[name] for name in BUILT_IN_TRACKERS if is_there(name)]
    if tracker_name in LOGGER_TYPE_TO_CLASS:
        tracker_class = LOGGER_TYPE_TO_CLASS[tracker_name]
        if tracker_class is not BUILT_IN_TRACKERS.get(tracker_name) or is_there(tracker_name):
            return [tracker_class]
        if distributed.rank() == 0:
            service = SERVICES.get(tracker_name)
            package_name = next(iter(service.distributions if service else ()), tracker_name)
            warnings.warn(
                f"log_with={tracker_name!r} is left out: {package_name} is not installed, so "
                f"nothing is logged there. Install it: pip install {package_name}",
                stacklevel=4,  # past filter_trackers and the Accelerator
            )
        return []
    known_names = [*LOGGER_TYPE_TO_CLASS, "all"]
    raise ConfigError(
        f"log_with={shown(item)} is not a known tracker. Nothing would be "
        f"logged.{closest(str(tracker_name), known_names)} There are: {', '.join(known_names)}. "
        "Give one of these, or an instance of a GeneralTracker. A class given to "
        "register_tracker_class is known in the process that did so."
    )


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


def logger_type_of(tracker: _Tracker) -> LoggerType | str | GeneralTracker:
    """What `Accelerator.log_with` shows for a requested tracker: its name, or the given object."""
    if not isinstance(tracker, type):
        return tracker
    return LoggerType(tracker.name) if tracker.name in LoggerType else tracker.name
