"""The hosts of a DeepSpeed hostfile, by ssh.

    worker-1 slots=4        # a comment
    worker-2 slots=4

`NBACCEL_SSH` has another command than ``ssh``; the host and the command line are its last
arguments.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
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
        """See :meth:`Engine.unavailable_reason`."""
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
        """See :meth:`Engine.unready_reason`."""
        return own_cluster.unready_reason(self.name)

    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """See :meth:`Engine.hosts`."""
        hosts = _filtered_hosts(_read_hostfile(Path(config.hostfile or "")), config)
        num_places = sum(host.slots or 0 for host in hosts)
        if config.num_processes is not None and config.num_processes > num_places:
            filters = {"include": config.include, "exclude": config.exclude}
            note = "".join(f" with {name}={text!r}" for name, text in filters.items() if text)
            raise ConfigError(
                f"num_processes={config.num_processes} with the {num_places} slots of "
                f"{config.hostfile}{note}: some workers would have nowhere to run. "
                "Ask for fewer, or write more slots."
            )
        return own_cluster.first_hosts(hosts, config.num_processes)

    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        """See :meth:`Engine.start_nodes`."""
        command = own_cluster.host_command(env.read(_PYTHON_VARIABLE, "") or "")
        commands = {
            host.name: [*_ssh_command(), host.address, shlex.join(command)]
            for host in hosts
            if not host.is_here
        }
        return own_cluster.OwnCluster(self.name, hosts, commands, env.snapshot())


def _ssh_command() -> list[str]:
    return shlex.split(env.read(_SSH_VARIABLE, "") or _SSH_COMMAND)


def _filtered_hosts(hosts: Sequence[Host], config: RunConfig) -> list[Host]:
    """The hosts that the settings leave, with as many slots as they leave of each."""
    left_slots = kept_slots(
        {host.name: host.slots or 0 for host in hosts},
        include=config.include,
        exclude=config.exclude,
    )
    return [
        # Of a whole host nothing is said to its workers, as without a filter.
        host
        if len(left_slots[host.name]) == host.slots
        else replace(host, slots=len(left_slots[host.name]), devices=left_slots[host.name])
        for host in hosts
        if host.name in left_slots
    ]


def _read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"hostfile={str(path)!r} cannot be read ({error.strerror or error}), so there "
            "are no hosts to run on. Give the path of a file with lines such as `worker-1 "
            "slots=4`."
        ) from error
    hosts: dict[str, Host] = {}
    mistakes = []
    own_names = _own_names()
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


def _own_names() -> frozenset[str]:
    """Names and addresses of this machine."""
    addresses = {
        entry.address.partition("%")[0]
        for interface_addresses in psutil.net_if_addrs().values()
        for entry in interface_addresses
    }
    return frozenset({"localhost", socket.gethostname(), *addresses})
