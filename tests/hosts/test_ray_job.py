"""Ray jobs, handed in to a real raylet: the one that `nbaccel export` writes, and a launch's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts.exported_project import (
    check_trained,
    export_project,
    job_variables,
    path_with_tools,
)
from tests.hosts.one_ray import one_cluster_at_a_time
from tests.isolation import ROOT
from tests.programs import run_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None,
        reason="jobs need Ray's dashboard: pip install 'ray[default]'",
    ),
]


@contextlib.contextmanager
def running_ray() -> Iterator[str]:
    """Where a raylet of four CPUs takes jobs."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.ray_head"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as head:
        try:
            lines = iter(head.stdout.readline, "")
            yield next(line.split()[-1] for line in lines if line.startswith("JOBS AT"))
        finally:
            head.stdin.close()
            try:
                head.wait(120)
            except subprocess.TimeoutExpired:  # with its raylet
                os.killpg(head.pid, signal.SIGKILL)


STOP_S = 30.0  # Ray gives a job three seconds to end by itself
ENDLESS = """
import os, pathlib, time
from nbaccel import PartialState

rank = PartialState(cpu=True).process_index
pathlib.Path("{out}", f"{{rank}}.pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def hand_in(num_nodes: int, jobs_address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Export a notebook for so many nodes, and run the shell script that this gives."""
    export_project(folder, "ray", num_nodes)
    environment = os.environ | {
        "RUNTIME_ENV": json.dumps({"env_vars": job_variables(folder)}),
        "RAY_ADDRESS": jobs_address,
        "PATH": path_with_tools(),
    }
    return run_program(["bash", "n_ray.sh"], check=False, cwd=folder, env=environment)


def hand_in_and_stop(jobs_address: str, folder: Path) -> dict[str, Any]:
    """Launch a script that never ends as a job, stop that, and see how long it takes to end."""
    out = folder / "out"
    out.mkdir(parents=True)
    (folder / "endless.py").write_text(ENDLESS.format(out=out))
    variables = {"PYTHONPATH": str(ROOT), "PATH": path_with_tools()}
    environment = os.environ | variables | {"RAY_ADDRESS": jobs_address}
    words = ["launch", "--engine", "ray", "-n", "2", "--device", "cpu"]
    words += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    with subprocess.Popen(
        [sys.executable, "-m", "nbaccel", *words, "endless.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        lines = iter(job.stdout.readline, "")
        number = next(found[0] for line in lines if (found := re.search(r"raysubmit_\w+", line)))
        began = wait_until(lambda: len([*out.glob("*.pid")]) == 2, seconds=200)
        workers = [psutil.Process(int(path.read_text())) for path in out.iterdir()]
        subprocess.run(["ray", "job", "stop", number], env=environment, timeout=100, check=True)
        told = job.communicate(timeout=STOP_S)[0]
        ended = wait_until(lambda: not any(map(psutil.Process.is_running, workers)), seconds=STOP_S)
    left = [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]
    return {
        "seconds": ended - began,
        "told": told,
        "left": [words for words in left if "endless.py" in " ".join(words or ())],
    }


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> float:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return time.monotonic()


@pytest.fixture(scope="module")
def jobs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray_jobs")


@pytest.fixture(scope="module")
def ended_jobs(jobs_folder: Path) -> dict[str, Any]:
    """Of one cluster: by number of nodes, and one that was stopped."""
    with one_cluster_at_a_time(), running_ray() as jobs_address:
        stopped = hand_in_and_stop(jobs_address, jobs_folder / "stopped")
        trained = {
            f"{num_nodes} nodes": hand_in(num_nodes, jobs_address, jobs_folder / str(num_nodes))
            for num_nodes in (1, 2)
        }
        return trained | {"stopped": stopped}


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_exported_job_trains_on_a_cluster(num_nodes, ended_jobs, jobs_folder):
    job = ended_jobs[f"{num_nodes} nodes"]
    assert job.returncode == 0, job.stdout + job.stderr
    check_trained(jobs_folder / str(num_nodes), job.stdout, 2 * num_nodes)


def test_a_job_that_is_stopped_ends_its_workers_and_leaves_nothing(ended_jobs):
    stopped = ended_jobs["stopped"]
    assert stopped["seconds"] < STOP_S
    assert "was stopped" in stopped["told"]
    assert stopped["left"] == []
