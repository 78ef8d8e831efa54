"""The nodes of the SLURM allocation that the notebook runs in, by srun.

`--overlap` is needed where the notebook is a step of the allocation itself: its own step holds the
resources, and srun would wait for them for ever (SLURM 22.05).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.hosts import own_cluster
from nbaccel.plan.contracts.host_engine import Engine, Host, NodeCrew

_JOB_VARIABLE = "SLURM_JOB_ID"
_NODES_VARIABLE = "SLURM_JOB_NODELIST"
_TASKS_VARIABLE = "SLURM_TASKS_PER_NODE"
_SCONTROL_S = 20.0
# Of the notebook's own step.
_STEP_VARIABLES = re.compile(
    r"SLURM_(STEP|STEPID|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS|NPROCS)"
)


class SlurmEngine(Engine):
    """Starts a Ray cluster on the nodes of an allocation."""

    name = "slurm"

    def unavailable_reason(self, config: RunConfig) -> str:
        """See :meth:`Engine.unavailable_reason`."""
        missing = [command for command in ("srun", "scontrol") if shutil.which(command) is None]
        if missing:
            return (
                f'engine="slurm" needs {" and ".join(missing)}, which this machine does not have '
                "on its PATH. Workers would have nowhere to run. Start the notebook on a node of "
                "the cluster."
            )
        if not env.read(_JOB_VARIABLE):
            return (
                'engine="slurm" needs an allocation, and this notebook runs in none '
                f"({_JOB_VARIABLE} is not set). Start it in one: `salloc --nodes=2 "
                "--ntasks-per-node=4 jupyter lab`. Or `nbaccel export --to slurm` writes a file "
                "for sbatch."
            )
        return ""

    def unready_reason(self) -> str:
        """See :meth:`Engine.unready_reason`."""
        return own_cluster.unready_reason(self.name)

    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """See :meth:`Engine.hosts`."""
        names = _allocated_names(env.read(_NODES_VARIABLE, "") or "")
        slots = _tasks_per_node(env.read(_TASKS_VARIABLE, "") or "")
        # An allocation that does not say how many tasks takes one per device, or core.
        slots_by_name = dict(zip(names, slots, strict=True)) if len(slots) == len(names) else {}
        num_places = sum(slots_by_name.values())
        if config.num_processes is not None and config.num_processes > num_places:
            # More workers than tasks were allocated: they are shared out evenly.
            slots_by_name = {}
        hosts = [
            Host(name=name, address=name, slots=slots_by_name.get(name), is_here=False)
            for name in names
        ]
        return own_cluster.first_hosts(hosts, config.num_processes)

    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        """See :meth:`Engine.start_nodes`."""
        environment = env.snapshot()
        for name in own_step_variables():
            del environment[name]
        command = own_cluster.host_command()
        commands = {host.name: [*srun_words([host.name]), *command] for host in hosts}
        return own_cluster.OwnCluster(self.name, hosts, commands, environment)


def srun_words(names: Sequence[str]) -> list[str]:
    """The beginning of a command that runs once on each of these nodes."""
    return [
        "srun",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--ntasks-per-node=1",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        f"--nodelist={','.join(names)}",
        # All cores of the node: workers are children of what runs there.
        "--cpu-bind=none",
    ]


def job_number() -> int:
    """The number of the allocation that this process is in."""
    return int(env.read(_JOB_VARIABLE, "0") or 0)


def own_step_variables() -> list[str]:
    """Variables of the step that this process is, which srun would take for options."""
    return [name for name in env.snapshot() if _STEP_VARIABLES.match(name)]


def _allocated_names(node_list: str) -> list[str]:
    """The nodes of an allocation."""
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SCONTROL_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{_NODES_VARIABLE}={node_list!r} cannot be read by `{' '.join(command)}`: {error}. "
            "The nodes of the allocation are not known. Look whether scontrol works in a terminal."
        ) from error
    return answer.stdout.split()


def _tasks_per_node(text: str) -> list[int]:
    """The numbers that `4(x2),2` stands for."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]
