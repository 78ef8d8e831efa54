"""Trackers of other people's services, against their own packages, offline.

None of these is part of the `dev` extra: ``pip install "nbaccel[trackers]"`` brings them, and what
is not there is skipped. Each runs in a process of its own, for most leave threads and processes.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nbaccel.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from tests.isolation import ROOT
from tests.programs import run_program

LOOP = """
import json, sys, warnings
import numpy as np, torch
from nbaccel import Accelerator

name, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = None
{before}
accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
accelerator.init_trackers("project", config={{"lr": 0.1}}, init_kwargs={{name: options}})
for step in range(3):
    accelerator.log({{"train_loss": 1 / (step + 1), "accuracy": torch.tensor(0.5)}}, step=step)
tracker, run = accelerator.get_tracker(name), accelerator.get_tracker(name, unwrap=True)
image = np.zeros((8, 8, 3), dtype=np.uint8)
{while_it_runs}
accelerator.end_training()
{afterwards}
print("FOUND" + json.dumps(found))
"""
VARIABLES = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_TRACKING_URI": "file:{folder}/runs",
    "COMET_OFFLINE_DIRECTORY": "{folder}/comet",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "CLEARML_LOG_LEVEL": "ERROR",
    "CLEARML_CACHE_DIR": "{folder}/cache",
    "TRACKIO_DIR": "{folder}/trackio",
}
"""What keeps them offline, in a folder, and quiet."""


def run(name: str, folder: Path, options: dict[str, Any] | None = None, **parts: str) -> Any:
    """What the script has found; it runs in `folder`."""
    if name not in [str(there) for there in get_available_trackers()]:
        pytest.skip(f"{name} is not installed")
    parts = {"before": "", "while_it_runs": "", "afterwards": ""} | parts
    code = LOOP.format(**{key: textwrap.dedent(text) for key, text in parts.items()})
    environ = os.environ | {key: text.format(folder=folder) for key, text in VARIABLES.items()}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    words = [sys.executable, "-c", code, name, str(folder), json.dumps(options or {})]
    done = run_program(words, cwd=folder, env=environ, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("FOUND")[2].partition("\n")[0])


def test_wandb(tmp_path):
    code = """
        tracker.log_images({"picture": [image]}, step=3)
        tracker.log_table("table", columns=["a"], data=[[1]], step=4)
        found = [run.config["lr"], run.summary["train_loss"], float(run.summary["accuracy"])]
    """
    assert run("wandb", tmp_path, while_it_runs=code) == [0.1, 1 / 3, 0.5]
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_mlflow(tmp_path):
    params, metrics, kind, name, told = run(
        "mlflow",
        tmp_path,
        {"run_name": "mine", "tags": {"kind": "test"}},
        while_it_runs="""
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                accelerator.log({"note": "text", "late": 2.0}, step=3)
            """,
        afterwards="""
            import mlflow
            data = mlflow.get_run(run.info.run_id).data
            found = [data.params, data.metrics, data.tags["kind"], data.tags["mlflow.runName"],
                     [str(w.message) for w in told if "left out" in str(w.message)]]
            """,
    )
    assert params == {"lr": "0.1"}
    assert metrics == {"train_loss": pytest.approx(1 / 3), "accuracy": 0.5, "late": 2.0}
    assert (kind, name) == ("test", "mine")
    assert len(told) == 1
    assert "log('note': ...) is left out: mlflow shows no str this way" in told[0]


def test_comet_ml(tmp_path):
    code = """
        accelerator.log({"note": "text", "losses": {"a": 1.0}}, step=3)
        found = [run.get_parameter("lr"), run.get_metric("train_loss"), run.get_metric("a")]
    """
    found = run("comet_ml", tmp_path, {"online": False}, while_it_runs=code)
    assert [float(value) for value in found] == [0.1, pytest.approx(1 / 3), 1.0]
    assert list(tmp_path.glob("comet/*.zip"))


def test_clearml(tmp_path):
    code = """
        tracker.log_images({"eval_picture": image}, step=3)
        tracker.log_table("table", columns=["a"], data=[[1]], step=4)
        found = [tracker._existing_task is None, run.name]
    """
    before = "from clearml import Task; Task.set_offline(True)"
    assert run("clearml", tmp_path, before=before, while_it_runs=code) == [True, "project"]


def test_dvclive(tmp_path):
    run("dvclive", tmp_path, {"dir": "live"})
    assert "lr" in (tmp_path / "live" / "params.yaml").read_text()
    assert json.loads((tmp_path / "live" / "metrics.json").read_text())["accuracy"] == 0.5


def test_swanlab(tmp_path):
    code = "tracker.log_images({'picture': [image]}, step=3)"
    run("swanlab", tmp_path, {"mode": "disabled"}, while_it_runs=code)


def test_aim(tmp_path):
    code = """
        tracker.log_images({"picture": (image, "caption")}, step=3)
        found = [run["hparams"]["lr"], run.name]
    """
    assert run("aim", tmp_path, while_it_runs=code) == [0.1, "project"]


def test_trackio(tmp_path):
    run("trackio", tmp_path)


def test_all_that_accelerate_knows_are_there():
    theirs = pytest.importorskip("accelerate.tracking").LOGGER_TYPE_TO_CLASS
    assert set(theirs) < set(LOGGER_TYPE_TO_CLASS)
    for name, kind in theirs.items():
        ours = LOGGER_TYPE_TO_CLASS[name]
        assert ours.__name__ == kind.__name__
        assert ours.requires_logging_directory is kind.requires_logging_directory
        public = {member for member in vars(kind) if not member.startswith("_")}
        assert not public - set(dir(ours)), name
