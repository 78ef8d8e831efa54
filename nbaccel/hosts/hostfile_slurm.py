"""Hosts of the user's: those of a DeepSpeed hostfile, by ssh; nodes of a SLURM allocation, by srun.

    worker-1 slots=4        # a comment
    worker-2 slots=4

`NBACCEL_SSH` has another command than ``ssh``; the host and the command line are its last
arguments.

With srun, `--overlap` is needed where the notebook is a step of the allocation itself: its own step
holds the resources, and srun would wait for them for ever (SLURM 22.05).
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import kept_slots
from nbaccel.hosts import own_cluster
from nbaccel.plan.contracts.host_engine import Engine, Host, NodeCrew

_SSH_VARIABLE = "NBACCEL_SSH"
# No password can be typed, and a host that does not answer must not keep the notebook waiting.
_SSH_COMMAND = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_LINE = re.compile(r"(\S+)\s+slots=(\d+)$")
_PYTHON_VARIABLE = "NBACCEL_REMOTE_PYTHON"


class HostfileEngine(Engine):
    """Starts a Ray cluster on the hosts of a hostfile."""

    name = "deepspeed"

    def unavailable_reason(self, config: RunConfig) -> str:
        if config.hostfile is None:
            return (
                'engine="deepspeed" needs hostfile=...: a file with a line such as `worker-1 '
                "slots=4` for each machine. Workers would have nowhere to run. Write one."
            )
        command = _ssh_command()
        if command and shutil.which(command[0]) is None:
            return (
                f'engine="deepspeed" starts workers by {command[0]!r}, which is not on the PATH. '
                "Install openssh-client, or name another command in NBACCEL_SSH."
            )
        try:
            self.hosts(config)
        except ConfigError as error:
            return " ".join(error.mistakes)
        return ""

    def unready_reason(self) -> str:
        return own_cluster.unready_reason(self.name)

    def hosts(self, config: RunConfig) -> Sequence[Host]:
        file_hosts = _read_hostfile(Path(config.hostfile or ""))
        num_slots = {host.name: host.slots or 0 for host in file_hosts}
        left_slots = kept_slots(num_slots, include=config.include, exclude=config.exclude)
        hosts = [
            # Of a whole host nothing is said to its workers, as without a filter.
            host
            if len(left_slots[host.name]) == host.slots
            else replace(host, slots=len(left_slots[host.name]), devices=left_slots[host.name])
            for host in file_hosts
            if host.name in left_slots
        ]
        num_places = sum(host.slots or 0 for host in hosts)
        if config.num_processes is not None and config.num_processes > num_places:
            filters = {"include": config.include, "exclude": config.exclude}
            note = "".join(f" with {name}={text!r}" for name, text in filters.items() if text)
            raise ConfigError(
                f"num_processes={config.num_processes} with the {num_places} slots of "
                f"{config.hostfile}{note}: workers lack places. Ask for fewer, or give more slots."
            )
        return own_cluster.first_hosts(hosts, config.num_processes)

    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        command = own_cluster.host_command(env.read(_PYTHON_VARIABLE, "") or "")
        commands = {
            host.name: [*_ssh_command(), host.address, shlex.join(command)]
            for host in hosts
            if not host.is_here
        }
        return own_cluster.OwnCluster(hosts, commands, env.snapshot())


def _ssh_command() -> list[str]:
    return shlex.split(env.read(_SSH_VARIABLE, "") or _SSH_COMMAND)


def _read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"hostfile={str(path)!r} cannot be read ({error.strerror or error}), so there are no "
            "hosts to run on. Give the path of a file with lines such as `worker-1 slots=4`."
        ) from error
    hosts: dict[str, Host] = {}
    mistakes = []
    # Names and addresses of this machine.
    entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    addresses = (entry.address.partition("%")[0] for entry in entries)
    own_names = {"localhost", socket.gethostname(), *addresses}
    for line_number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None or found[2] == "0":
            mistakes.append(
                f"{path}, line {line_number}: {text!r} is not `name slots=N` with N of 1 or "
                "more. It would be unclear how many workers run there. Correct the line."
            )
        elif found[1] in hosts:
            mistakes.append(
                f"{path}, line {line_number}: {found[1]} is there twice. Its slots would be "
                "counted twice. Remove one of the lines."
            )
        else:
            hosts[found[1]] = Host(
                name=found[1],
                address=found[1].rpartition("@")[2],
                slots=int(found[2]),
                is_here=found[1] in own_names,
            )
    if not hosts and not mistakes:
        mistakes.append(
            f"{path} names no host, so there is nowhere to run. Write lines such as "
            "`worker-1 slots=4`."
        )
    if mistakes:
        raise ConfigError(*mistakes)
    return list(hosts.values())


_JOB_VARIABLE = "SLURM_JOB_ID"
_NODES_VARIABLE = "SLURM_JOB_NODELIST"
_TASKS_VARIABLE = "SLURM_TASKS_PER_NODE"
_SCONTROL_S = 20.0
# Of the notebook's own step.
_STEP_VARIABLES = re.compile(r"SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS|NPROCS)")


class SlurmEngine(Engine):
    """Starts a Ray cluster on the nodes of an allocation."""

    name = "slurm"

    def unavailable_reason(self, config: RunConfig) -> str:
        missing = [command for command in ("srun", "scontrol") if shutil.which(command) is None]
        if missing:
            return (
                f'engine="slurm" needs {" and ".join(missing)}, which this machine does not have '
                "on its PATH. Start the notebook on a node of the cluster."
            )
        if not env.read(_JOB_VARIABLE):
            return (
                'engine="slurm" needs an allocation, and this notebook runs in none '
                f"({_JOB_VARIABLE} is not set). Start it in one: `salloc --nodes=2 "
                "--ntasks-per-node=4 jupyter lab`; or `nbaccel export --to slurm` for sbatch."
            )
        return ""

    def unready_reason(self) -> str:
        return own_cluster.unready_reason(self.name)

    def hosts(self, config: RunConfig) -> Sequence[Host]:
        node_list = env.read(_NODES_VARIABLE, "") or ""
        command = ["scontrol", "show", "hostnames", node_list]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_SCONTROL_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"{_NODES_VARIABLE}={node_list!r} cannot be read by `{' '.join(command)}`: "
                f"{error}. Its nodes are not known. Look whether scontrol works in a terminal."
            ) from error
        names = answer.stdout.split()
        # It stands for numbers in a row: `4(x2),2`.
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.read(_TASKS_VARIABLE, "") or "")
        slots = [int(count) for count, times in groups for _ in range(int(times or 1))]
        # An allocation that does not say how many tasks takes one per device, or core.
        slots_by_name = dict(zip(names, slots, strict=True)) if len(slots) == len(names) else {}
        if config.num_processes is not None and config.num_processes > sum(slots_by_name.values()):
            # More workers than tasks were allocated: they are shared out evenly.
            slots_by_name = {}
        hosts = [Host(name=name, address=name, slots=slots_by_name.get(name)) for name in names]
        return own_cluster.first_hosts(hosts, config.num_processes)

    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        environment = env.snapshot()
        for name in own_step_variables():
            del environment[name]
        command = own_cluster.host_command()
        commands = {host.name: [*srun_words([host.name]), *command] for host in hosts}
        return own_cluster.OwnCluster(hosts, commands, environment)


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
