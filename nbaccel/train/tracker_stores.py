"""Trackers that keep runs in files of this machine (or a server's): Aim, MLflow, DVCLive."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

from nbaccel import env
from nbaccel.train.tracker_contract import ServiceTracker

__all__ = ["AimTracker", "DVCLiveTracker", "MLflowTracker"]


class AimTracker(ServiceTracker):
    """A run of Aim.

    Args:
        run_name: Its name.
        logging_dir: Folder of Aim's repository.
        **kwargs: Of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @property
    def writer(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        self.run = import_module("aim").Run(repo=str(self.aim_repo_path), **self.init_kwargs)
        self.run.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; anything that ``Run.track`` takes."""
        for name, value in values.items():
            self.run.track(value, name=name, step=step, **kwargs)

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Write images, each alone or with its caption in a tuple.

        Args:
            values: By name.
            step: Of the training.
            kwargs: Further arguments: ``aim_image`` of ``aim.Image``, ``track`` of ``Run.track``.
        """
        image: Any = import_module("aim").Image
        more = kwargs or {}
        for name, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            made = image(picture, caption=caption, **more.get("aim_image", {}))
            self.run.track(made, name=name, step=step, **more.get("track", {}))

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None:
            self.run.close()


class MLflowTracker(ServiceTracker):
    """A run of MLflow.

    Args:
        experiment_name: Its experiment, made if there is none (``MLFLOW_EXPERIMENT_NAME``).
        logging_dir: Where a new experiment keeps files; None leaves it to MLflow.
        run_id: The run to go on with (``MLFLOW_RUN_ID``); None begins one.
        tags: Of the run, as a dict or its JSON (``MLFLOW_TAGS``).
        nested_run: Whether it is part of the run that is active (``MLFLOW_NESTED_RUN``).
        run_name: Name of a new run.
        description: Of the run.

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
        said = env.read("MLFLOW_TAGS") or tags
        self.tags = json.loads(said) if isinstance(said, str) else said
        nested = env.flag("MLFLOW_NESTED_RUN")
        self.nested_run = bool(nested_run if nested is None else nested)
        self.description = description

    @property
    def active_run(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        mlflow: Any = import_module("mlflow")
        self.run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(mlflow),
            run_name=self.run_name or None,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self, mlflow: Any) -> str:
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else str(self.logging_dir)
        return str(mlflow.create_experiment(self.experiment_name, place, self.tags))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration, as far as MLflow takes texts of such a length."""
        mlflow: Any = import_module("mlflow")
        limits: Any = import_module("mlflow.utils.validation")
        fitting = {n: v for n, v in values.items() if len(str(v)) <= limits.MAX_PARAM_VAL_LENGTH}
        if left := sorted(values.keys() - fitting.keys()):
            warnings.warn(
                f"MLflow takes values of at most {limits.MAX_PARAM_VAL_LENGTH} letters: "
                f"{', '.join(left)} are left out of the configuration. Shorten them.",
                stacklevel=4,
            )
        items, most = list(fitting.items()), limits.MAX_PARAMS_TAGS_PER_BATCH
        for first in range(0, len(items), most):
            mlflow.log_params(dict(items[first : first + most]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers alone."""
        numbers = dict(self.shown(values, (Real,)))
        import_module("mlflow").log_metrics(numbers, step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Write a figure of matplotlib or plotly as a file of the run."""
        import_module("mlflow").log_figure(figure, artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep all files of a folder with the run."""
        import_module("mlflow").log_artifacts(local_dir, artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        import_module("mlflow").log_artifact(local_path, artifact_path)

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None:
            import_module("mlflow").end_run()


class DVCLiveTracker(ServiceTracker):
    """DVCLive.

    Args:
        run_name: Not used: DVCLive names by folder.
        live: A ``dvclive.Live`` to go on with.
        **kwargs: Of ``dvclive.Live``.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self.run = live

    @property
    def live(self) -> Any:
        """The ``Live``."""
        return self.run

    def start(self) -> None:
        """See :meth:`GeneralTracker.start`."""
        if self.run is None:
            self.run = import_module("dvclive").Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See :meth:`GeneralTracker.store_init_configuration`."""
        self.run.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See :meth:`GeneralTracker.log`; numbers and texts."""
        if step is not None:
            self.run.step = step
        for name, value in self.shown(values, (Real, str)):
            self.run.log_metric(name, value, **kwargs)
        self.run.next_step()

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None:
            self.run.end()
