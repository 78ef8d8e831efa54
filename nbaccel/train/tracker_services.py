"""Trackers of other people's services: each needs its package, which is imported when a run begins.

Arguments are those of the packages, as Accelerate's users write them in ``init_kwargs``; what a
service cannot show is left out, with one warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any

from nbaccel import env
from nbaccel._optional import is_package
from nbaccel.train.tracker_contract import GeneralTracker, ServiceTracker
from nbaccel.train.tracker_stores import AimTracker, DVCLiveTracker, MLflowTracker

__all__ = [
    "SERVICES",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "MLflowTracker",
    "Service",
    "SwanLabTracker",
    "TrackioTracker",
    "WandBTracker",
]


class WandBTracker(ServiceTracker):
    """A run of Weights & Biases; arguments are those of ``wandb.init``."""

    name = "wandb"

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        self.run = import_module("wandb").init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; anything that ``wandb.log`` takes."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write lists of images, as arrays or of PIL, by name."""
        image: Any = import_module("wandb").Image
        for name, images in values.items():
            self.log({name: [image(one) for one in images]}, step=step, **kwargs)

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
        table: Any = import_module("wandb").Table
        whole = table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: whole}, step=step, **kwargs)


class SwanLabTracker(ServiceTracker):
    """A run of SwanLab; arguments are those of ``swanlab.init``."""

    name = "swanlab"

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        self.run = import_module("swanlab").init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        import_module("swanlab").config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; anything that ``swanlab.log`` takes."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write lists of images, as arrays or of PIL, by name."""
        image: Any = import_module("swanlab").Image
        for name, images in values.items():
            self.log({name: [image(one) for one in images]}, step=step, **kwargs)


class TrackioTracker(ServiceTracker):
    """A run of Trackio; arguments are those of ``trackio.init``."""

    name = "trackio"

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        self.run = import_module("trackio").init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`."""
        self.run.log(values, step=step, **kwargs)


class CometMLTracker(ServiceTracker):
    """An experiment of Comet; arguments are those of ``comet_ml.start``."""

    name = "comet_ml"

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        self.run = import_module("comet_ml").start(project_name=self.run_name, **self.init_kwargs)

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers, texts, and dicts of numbers."""
        if step is not None:
            self.run.set_step(step)
        for name, value in self.shown(values, (Real, str, dict)):
            if isinstance(value, str):
                self.run.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.run.log_metrics(value, step=step, **kwargs)
            else:
                self.run.log_metric(name, value, step=step, **kwargs)

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None:
            self.run.end()


class ClearMLTracker(ServiceTracker):
    """A task of ClearML; arguments are those of ``Task.init``.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` win over `run_name`; a task that has been begun already
    is gone on with, and left open.
    """

    name = "clearml"

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        kind: Any = import_module("clearml").Task
        self._found = kind.current_task()
        names = {
            "project_name": env.read("CLEARML_PROJECT") or self.run_name,
            "task_name": env.read("CLEARML_TASK") or self.run_name,
        }
        self.run = self._found or kind.init(**{**names, **self.init_kwargs})

    @property
    def task(self) -> Any:
        """The task."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers; ``train_``, ``eval_`` and ``test_`` before a name make series of one plot.

        Args:
            values: By name.
            step: Of the training; without one a number stands alone.
            **kwargs: Of the task's logger.
        """
        logger = self.run.get_logger()
        for name, value in self.shown(values, (Real,)):
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                logger.report_scalar(**_plot(name), value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images, as arrays or of PIL, by name."""
        logger = self.run.get_logger()
        for name, image in values.items():
            logger.report_image(**_plot(name), iteration=step, image=image, **kwargs)

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
        whole = rows if dataframe is None else dataframe
        logger = self.run.get_logger()
        logger.report_table(**_plot(table_name), table_plot=whole, iteration=step, **kwargs)

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None and self._found is None:
            self.run.close()


def _plot(name: str) -> dict[str, str]:
    series, _, title = name.partition("_")
    if title and series in ("eval", "test", "train"):
        return {"title": title, "series": series}
    return {"title": name, "series": "train"}


@dataclass(frozen=True, slots=True)
class Service:
    """A tracker and the package that it needs.

    Attributes:
        tracker: Its class.
        distributions: What pip calls the package; any of them will do.
    """

    tracker: type[GeneralTracker]
    distributions: tuple[str, ...]

    def is_there(self) -> bool:
        """Whether the package is installed; a folder of its name is none."""
        return is_package(self.tracker.name, self.distributions)


SERVICES = {
    "wandb": Service(WandBTracker, ("wandb",)),
    "trackio": Service(TrackioTracker, ("trackio",)),
    "comet_ml": Service(CometMLTracker, ("comet-ml",)),
    "aim": Service(AimTracker, ("aim",)),
    "mlflow": Service(MLflowTracker, ("mlflow", "mlflow-skinny")),
    "clearml": Service(ClearMLTracker, ("clearml",)),
    "dvclive": Service(DVCLiveTracker, ("dvclive",)),
    "swanlab": Service(SwanLabTracker, ("swanlab",)),
}
"""By the name that `log_with` gives them, which is also that of the module."""
