"""The engine slurm with SLURM's own daemons: a notebook inside an allocation of two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts import netns, slurm_cluster
from tests.hosts.exported_project import (
    check_trained,
    export_project,
    job_variables,
    path_with_tools,
)
from tests.hosts.running_script import RunningScript
from tests.hosts.slurm_cluster import SlurmCluster
from tests.isolation import ROOT

pytestmark = [pytest.mark.slow, netns.needs_hosts, slurm_cluster.needs_slurm]

SCRIPT = Path(__file__).with_name("notebook.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Allocated(RunningScript):
    """The script in an allocation: by salloc, or as a step of it by srun."""

    def __init__(self, cluster: SlurmCluster, folder: Path, cell: str, *inside: str) -> None:
        allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *inside)
        super().__init__(
            _Prefixed(cluster.host, allocation),
            folder,
            SCRIPT,
            cell,
            "slurm",
            SLURM_CONF=cluster.environment["SLURM_CONF"],
        )


class _Prefixed:
    def __init__(self, host: netns.NamespaceHost, prefix: tuple[str, ...]) -> None:
        self._host, self._prefix = host, prefix

    def python(self, script: Path, *arguments: str, **options: object) -> object:
        streams = {"stdout": -1, "stderr": -1} | options
        return self._host.start(
            *self._prefix, sys.executable, "-u", str(script), *arguments, **streams
        )


def left_in(cluster: SlurmCluster) -> list[str]:
    """Processes of Python on the cluster's host."""
    found = []
    for pid in cluster.host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if "python" in process.name():
                found.append(" ".join(process.cmdline())[:80])
    return found


@pytest.mark.parametrize("inside", [(), ("srun", "--ntasks=1", "--nodes=1")])
def test_a_notebook_in_an_allocation_trains_on_all_its_nodes(
    cluster: SlurmCluster, tmp_path: Path, inside: tuple[str, ...]
) -> None:
    told = Allocated(cluster, tmp_path, "train", *inside).told()
    assert told["places"] == [["0", "n1"], ["1", "n1"], ["0", "n2"], ["1", "n2"]]
    assert told["weights"] == told["local_weights"] != told["start"]
    assert left_in(cluster) == []


def test_a_killed_task_is_told_with_its_host(cluster: SlurmCluster, tmp_path: Path) -> None:
    notebook = Allocated(cluster, tmp_path, "hang")
    notebook.wait_for("hangs", times=4)
    (actor,) = [
        pid
        for pid in cluster.host.processes()
        if "NodeActor" in " ".join(psutil.Process(pid).cmdline())
        and psutil.Process(pid).environ().get("SLURMD_NODENAME") == "n2"
    ]
    os.kill(actor, signal.SIGKILL)
    told = notebook.told()
    assert told["kind"] == "WorkerDied"
    assert "host n2 was lost" in told["text"]
    assert left_in(cluster) == []


def test_stop_ends_the_workers_on_all_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    notebook = Allocated(cluster, tmp_path, "hang")
    notebook.wait_for("hangs", times=4)
    pressed_at = time.time()
    (kernel,) = [
        child
        for child in psutil.Process(notebook.process.pid).children(recursive=True)
        if str(SCRIPT) in child.cmdline()
    ]
    kernel.send_signal(signal.SIGINT)
    told = notebook.told()
    assert told["kind"] == "KeyboardInterrupt"
    assert told["at"] - pressed_at < 5
    assert left_in(cluster) == []


def test_the_exported_sbatch_file_trains_on_all_nodes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    export_project(folder, "slurm", num_nodes=2)
    variables = {**job_variables(folder), "PATH": path_with_tools()}
    job = cluster.run(
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *("sbatch", "--wait", f"--chdir={folder}", str(folder / "n.sbatch")),
        seconds=200,
    )
    output = "".join(log.read_text() for log in folder.glob("n-*.log"))
    assert job.returncode == 0, job.stderr + output
    check_trained(folder, output, 4)
    assert left_in(cluster) == []


def test_a_script_is_launched_by_srun_on_all_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        # Whole lines: processes of a node share their output.
        "node, a = os.environ['SLURMD_NODENAME'], os.environ['A']\n"
        "os.write(1, f'NODE {node} SUM {int(total)} {a}\\n'.encode())\n"
        # Without it torch aborts at the end now and then.
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    job = cluster.run(
        *("env", f"PYTHONPATH={ROOT}", "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"),
        *(sys.executable, "-m", "nbaccel", "launch", "--cpu", "--engine", "slurm"),
        *("--env", "A=b", str(script)),
        seconds=200,
    )
    assert job.returncode == 0, job.stderr
    told = sorted(line for line in job.stdout.splitlines() if line.startswith("NODE"))
    assert told == ["NODE n1 SUM 4 b"] * 2 + ["NODE n2 SUM 4 b"] * 2, job.stdout + job.stderr
    assert left_in(cluster) == []


def test_without_an_allocation_it_says_how_to_get_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    told = RunningScript(
        cluster.host,
        tmp_path,
        SCRIPT,
        "refused",
        "slurm",
        SLURM_CONF=cluster.environment["SLURM_CONF"],
    ).told()
    assert told["kind"] == "ConfigError"
    assert "SLURM_JOB_ID is not set" in told["text"]
    assert "salloc --nodes=2" in told["text"]
