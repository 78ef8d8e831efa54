"""The Ray job that `nbaccel export` writes, handed in to a real raylet."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.exported_project import (
    check_trained,
    export_project,
    job_variables,
    path_with_tools,
)
from tests.hosts.one_ray import one_cluster_at_a_time
from tests.isolation import ROOT

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


def hand_in(num_nodes: int, jobs_address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Export a notebook for so many nodes, and run the shell script that this gives."""
    export_project(folder, "ray", num_nodes)
    environment = os.environ | {
        "RUNTIME_ENV": json.dumps({"env_vars": job_variables(folder)}),
        "RAY_ADDRESS": jobs_address,
        "PATH": path_with_tools(),
    }
    command = ["bash", "n_ray.sh"]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def jobs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray_jobs")


@pytest.fixture(scope="module")
def ended_jobs(jobs_folder: Path) -> dict[int, subprocess.CompletedProcess[str]]:
    """By number of nodes."""
    with one_cluster_at_a_time(), running_ray() as jobs_address:
        return {
            num_nodes: hand_in(num_nodes, jobs_address, jobs_folder / str(num_nodes))
            for num_nodes in (1, 2)
        }


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_exported_job_trains_on_a_cluster(num_nodes, ended_jobs, jobs_folder):
    job = ended_jobs[num_nodes]
    assert job.returncode == 0, job.stdout + job.stderr
    check_trained(jobs_folder / str(num_nodes), job.stdout, 2 * num_nodes)
