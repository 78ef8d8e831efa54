"""Two or more hosts on one machine: network namespaces with a bridge between them.

Each has its own network, host name and /etc/hosts; files, memory and processes are this machine's.
A host is lost by killing all that runs in it, or by taking its cable away.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.one_ray import one_cluster_at_a_time

REFUSED = "hosts are made of network namespaces, which takes root and iproute2"


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    trial = f"nbtry{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", trial], check=True)
    return made.returncode == 0


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason=REFUSED)


@dataclass(frozen=True)
class NamespaceHost:
    """One host."""

    name: str
    namespace: str
    address: str
    files: Path
    own_disk: Path | None = None  # a folder whose contents only this host sees

    def command(self, *command: str) -> list[str]:
        """A command line that runs on this host."""
        quoted_name, hosts_file = self.name, self.files / "hosts"
        script = (
            f"hostname {quoted_name}; mount --bind {hosts_file} /etc/hosts; "
            "umount /etc/resolv.conf 2>/dev/null; "
            f"mount --bind {self.files / 'resolv.conf'} /etc/resolv.conf; "
        )
        if self.own_disk is not None:
            disk = self.files / f"disk_of_{self.name}"
            disk.mkdir(exist_ok=True)
            script += f"mount --bind {disk} {self.own_disk}; "
        script += 'exec "$@"'
        # Not by `ip netns exec`, which mounts a new /sys, without the machine's control groups.
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", script, "sh", *command]

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command on this host."""
        return subprocess.Popen(self.command(*command), text=True, **options)  # type: ignore[call-overload]

    def python(self, script: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
        """Start a Python script on this host, with its output in pipes."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return self.start(sys.executable, "-u", str(script), *arguments, **streams)

    def processes(self) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def kill(self) -> None:
        """Kill all that runs on this host, at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self) -> None:
        """Take its network away; its processes go on."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")


@contextlib.contextmanager
def make_hosts(
    folder: Path, number: int = 2, own_disk: Path | None = None
) -> Iterator[list[NamespaceHost]]:
    """Hosts in one network, called alpha, beta, gamma."""
    mark = uuid.uuid4().hex[:5]
    subnet = f"10.{int(mark[:2], 16)}.{int(mark[2:4], 16)}"
    names = ["alpha", "beta", "gamma", "delta"][:number]
    addresses = {name: f"{subnet}.{place}" for place, name in enumerate(names, 1)}
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{at} {name}\n::ffff:{at} {name}\n" for name, at in addresses.items())
    )
    # No name server: a look-up that nobody answers would take seconds.
    (folder / "resolv.conf").write_text("")
    bridge = f"nb{mark}"
    # What is launched on them starts one.
    with one_cluster_at_a_time(), contextlib.ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        for place, name in enumerate(names):
            namespace, cable = f"nb{mark}{name}", f"nb{mark}c{place}"
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "del", namespace)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{addresses[name]}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            hosts.append(NamespaceHost(name, namespace, addresses[name], folder, own_disk))
        undo.callback(lambda: [host.kill() for host in hosts])
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def remote_shell(folder: Path, hosts: list[NamespaceHost]) -> Path:
    """A command in the place of ssh: `remote_shell HOST COMMAND` runs the command on that host."""
    cases = "".join(
        f'{host.name}|{host.address}) exec {shlex.join(host.command("sh", "-c"))} "$*";;\n'
        for host in hosts
    )
    script = folder / "remote_shell"
    script.write_text(f'#!/bin/sh\nhost="$1"; shift\ncase "$host" in\n{cases}esac\nexit 255\n')
    script.chmod(0o755)
    return script
