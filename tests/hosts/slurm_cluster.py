"""SLURM for real: a controller and two nodes in a network namespace of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import netns

COMMANDS = ("slurmctld", "slurmd", "munged", "srun", "salloc")
MISSING = [command for command in COMMANDS if shutil.which(command) is None]
needs_slurm = pytest.mark.skipif(
    bool(MISSING), reason=f"needs slurm-wlm and munge; missing: {', '.join(MISSING)}"
)

CONFIGURATION = """
ClusterName=probe
SlurmctldHost={name}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={name} NodeAddr={address} Port=[17001-17002] CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES State=UP
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster with two nodes, n1 and n2, which are one host."""

    host: netns.NamespaceHost
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.host.command(*command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the daemons; they end with the block."""
    with netns.make_hosts(folder, 1) as (host,):
        # Both nodes are this host: their names lead to it.
        (folder / "hosts").write_text(
            (folder / "hosts").read_text() + f"{host.address} n1\n{host.address} n2\n"
        )
        # Sockets of munge refuse to lie in a folder that others may write to.
        folder.chmod(0o755)
        (folder / "state").mkdir()
        for node in ("n1", "n2"):
            (folder / f"spool.{node}").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(name=host.name, address=host.address, folder=folder)
        )
        cluster = SlurmCluster(host, folder)
        daemons = [
            subprocess.Popen(
                host.command(*command),
                env=cluster.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for command in (
                [
                    *("munged", "--foreground", "--force", f"--key-file={key}"),
                    *(f"--socket={folder}/munge.sock", f"--pid-file={folder}/munge.pid"),
                    *(f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
                ],
                ["slurmctld", "-D"],
                ["slurmd", "-D", "-N", "n1"],
                ["slurmd", "-D", "-N", "n2"],
            )
        ]
        try:
            _await_nodes(cluster)
            yield cluster
        finally:
            host.kill()
            for daemon in daemons:
                daemon.wait()


def _await_nodes(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + 30
    answer = ""
    while time.monotonic() < deadline:
        answer = cluster.run("sinfo", "--noheader", "--format=%D %t").stdout
        if "2 idle" in answer:
            return
        time.sleep(0.3)
    logs = "".join(log.read_text()[-500:] for log in cluster.folder.glob("*.log"))
    pytest.fail(f"SLURM's daemons did not come up: {answer}\n{logs}")
