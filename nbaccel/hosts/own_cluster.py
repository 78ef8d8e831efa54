"""A Ray cluster of the notebook's own, on hosts that it reaches by ssh or srun.

    notebook's machine                            each host
    ------------------                            ---------
    `hosts.ray_host`: the head
    a process of ssh or srun for each   ──────►   `hosts.ray_host`: `ray start`, until the notebook
    an actor on each host, by a         ══ Ray ═► hangs up
    resource that is named for it

It takes no part in a cluster of the user's. Ray's token authentication is on, with a token of this
process that goes to the hosts by standard input; RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_USE_TLS with
its files, set by the user, are obeyed.

Seen in Ray 2.60: `ray.init` leaves a handler of SIGTERM and environment variables behind; a token
is read once per process, unless its loader is told to forget it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, StartupFailed
from nbaccel.base.optional_packages import is_installed
from nbaccel.base.processes import LOOPBACK_ADDRESSES, listen
from nbaccel.hosts.ray_host import host_resource
from nbaccel.plan.contracts.host_engine import Host, NodeCrew

_HOST_CODE = (
    "import sys, os; folder = {folder!r}; "
    "os.path.isdir(os.path.join(folder, 'nbaccel')) and sys.path.insert(0, folder); "
    "from nbaccel.hosts.ray_host import main; main()"
)
_HEAD_S = 180.0  # For the head to be there: a raylet takes seconds, and minutes on a busy machine
_LOOK_S = 0.05
_STARTED = "Ray runtime started."  # What `ray start` says once its node has joined
_LEAVE_S = 5.0  # For processes on hosts to end once the notebook has hung up
_ERROR_CHARS = 1200
_HEAD_NAME = "(this machine)"
_LEAST_AMOUNT = 0.0001  # that Ray counts
_ANY_PORT = 9  # nothing is sent there
_RAYS_VARIABLES = ("RAY_", "PYTHONBREAKPOINT")
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TLS_VARIABLES = ["RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"]
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers see all devices of their host, as without Ray.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR": "1",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1",
    # Ray runs its workers at nice 15, and ours with them.
    "RAY_worker_niceness": "0",
    # A silent host is given up after about 15 s, and gives itself up after that time, too.
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    # A raylet gives up where its helpers have not been imported after half a minute.
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_raylet_start_wait_time_s": "60",
}


def unready_reason(engine: str) -> str:
    """Why no cluster of its own can be started for this engine; empty where it can."""
    if not is_installed("ray"):
        return (
            f"engine={engine!r} starts a Ray cluster on its hosts, and Ray is not installed. "
            'Install it with pip install "nbaccel[ray]", in the same version on all of them.'
        )
    if _clusters or not is_connected():
        return ""
    return (
        f"engine={engine!r} starts a Ray cluster on its hosts, and this notebook is connected to "
        'another one already. Call ray.shutdown() first, or let that one run them: engine="ray".'
    )


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def first_hosts(hosts: Sequence[Host], num_workers: int | None) -> list[Host]:
    """The first hosts, as many as so many workers take; all for None."""
    if num_workers is None:
        return list(hosts)
    places = itertools.accumulate((host.slots or 1 for host in hosts), initial=0)
    return [host for host, taken in zip(hosts, places, strict=False) if taken < num_workers]


def host_command(python: str = "") -> list[str]:
    """The command line that runs `hosts.ray_host` on a host."""
    # A checkout, or a folder given by PYTHONPATH, where hosts share a file system. Not the folder
    # of installed packages: in front of the standard library these would hide parts of it.
    package_folder = str(Path(__file__).parents[2])
    shared_folder = "" if package_folder.endswith("-packages") else package_folder
    return [python or sys.executable, "-c", _HOST_CODE.format(folder=shared_folder)]


class _HostProcess:
    """A process on this machine that leads to a host (ssh, srun)."""

    def __init__(
        self, command: Sequence[str], order: dict[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.command = command
        # A file: nobody reads a pipe while all is well, and a full one would stop it.
        self.errors: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self.errors,
            stderr=self.errors,
            env=dict(environment),
            # Ctrl-C in a terminal must reach the notebook only.
            start_new_session=True,
        )
        # Not closed: what runs there ends with it.
        self.stdin = cast("IO[bytes]", self.process.stdin)
        # It may have ended already; its status says why.
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(json.dumps(order).encode() + b"\n")
            self.stdin.flush()

    def output(self) -> str:
        num_bytes = os.fstat(self.errors.fileno()).st_size
        # By position: the process that writes has the same file offset.
        return os.pread(self.errors.fileno(), num_bytes, 0).decode(errors="replace")

    def problem(self) -> str:
        """How it has ended and what it said; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        text = self.output().strip()[-_ERROR_CHARS:]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        return f"{self.command[0]} has ended ({how})" + (f": {text}" if text else "")


class _Cluster:
    """The cluster that this process is connected to, which several sessions may use."""

    def __init__(self) -> None:
        self.num_users = 0
        self._processes: dict[str, _HostProcess] = {}
        self.on_end = contextlib.ExitStack()
        self._order: dict[str, Any] = {}

    def start_head(self, address: str) -> None:
        """Start the head on this machine, and have hosts told of it."""
        folder = tempfile.mkdtemp(prefix="nbray-")
        self.on_end.callback(shutil.rmtree, folder, ignore_errors=True)
        self.on_end.callback(self._end_processes)
        with listen(address, None) as free:
            port = free.getsockname()[1]
        # Variables of all processes of the cluster; those that the user has set are kept.
        settings = {name: env.read(name) or value for name, value in _SETTINGS.items()}
        users = {name: env.read(name) for name in (*_TOKEN_VARIABLES, *_TLS_VARIABLES)}
        settings |= {name: value for name, value in users.items() if value}
        if not any(name in settings for name in _TOKEN_VARIABLES):
            settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        environment = {**settings, "RAY_AUTH_MODE": env.read("RAY_AUTH_MODE", "token")}
        self._order = {"head": f"{address}:{port}", "environment": environment}
        self.start_node(_HEAD_NAME, host_command(), env.snapshot(), address, head_folder=folder)

    def connect(self) -> None:
        """Connect this process to the head, once it is there."""
        # Imported while it starts.
        with _rfc3987_syntax_later():
            import ray

        head = self._processes[_HEAD_NAME]
        deadline = time.monotonic() + _HEAD_S
        # Until then `ray.init` would look once a second.
        while _STARTED not in head.output():
            problem = head.problem()
            if problem or time.monotonic() >= deadline:
                raise StartupFailed(
                    "Ray did not start on this machine, so no worker was started. "
                    + (problem or f"Nothing was heard of it for {_HEAD_S:.0f} s.")
                )
            time.sleep(_LOOK_S)
        self.on_end.enter_context(_kernel_as_before())
        with env.applied(self._order["environment"]):
            _reread_settings()
            self.on_end.callback(ray.shutdown)
            ray.init(
                address=self._order["head"],
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=self._order["head"].rpartition(":")[0],
            )

    def start_node(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        address: str,
        head_folder: str = "",
    ) -> None:
        """Start the node that a command leads to, unless it is there."""
        if name not in self._processes or self._processes[name].problem():
            order = {"name": name, "address": address, "head_folder": head_folder, **self._order}
            self._processes[name] = _HostProcess(command, order, environment)

    def problems(self) -> dict[str, str]:
        """Hosts whose process has ended, each with what is known of it."""
        found = {name: process.problem() for name, process in self._processes.items()}
        return {name: problem for name, problem in found.items() if problem}

    def _end_processes(self) -> None:
        for host in self._processes.values():
            # What runs there ends with it.
            with contextlib.suppress(BrokenPipeError):
                host.stdin.close()
        deadline = time.monotonic() + _LEAVE_S
        for host in self._processes.values():
            try:
                host.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # Its group: a command such as srun has children.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(host.process.pid, signal.SIGKILL)
                host.process.wait()
            host.errors.close()
        self._processes.clear()


# A fact of the process, as the connection to Ray is.
_clusters: list[_Cluster] = []


class OwnCluster(NodeCrew):
    """Actors on hosts of the notebook's own cluster. See :class:`NodeCrew`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
    ) -> None:
        """Start what is not there of it; `commands` has what runs `ray_host`, by a host's name."""
        from nbaccel.hosts.node_actor import start_actor

        addresses = _addresses_of(hosts)
        is_first = not _clusters
        if is_first:
            _clusters.append(_Cluster())
        self._cluster = _clusters[0]
        self._cluster.num_users += 1
        self.actors: dict[str, Any] = {}
        try:
            if is_first:
                # Where the hosts' nodes reach the head: the way to one of them.
                own = [_address_towards(address) for address in addresses.values()]
                own_address = next((one for one in own if one not in LOOPBACK_ADDRESSES), own[0])
                self._cluster.start_head(own_address)
            for name, command in commands.items():
                self._cluster.start_node(name, command, environment, addresses[name])
            if is_first:
                self._cluster.connect()
            for host in hosts:
                # Ray makes it once a node with the resource has joined.
                place = host_resource(_HEAD_NAME if host.is_here else host.name)
                self.actors[host.name] = start_actor(num_cpus=0, resources={place: _LEAST_AMOUNT})
        except BaseException:  # an interrupt must leave nothing behind either
            self.end()
            raise

    def problems(self) -> Mapping[str, str]:
        return self._cluster.problems()

    def end(self) -> None:
        self._cluster.num_users -= 1
        if self._cluster.num_users == 0:
            _clusters.clear()
            self._cluster.on_end.close()


@contextlib.contextmanager
def _rfc3987_syntax_later() -> Iterator[None]:
    """Let what is imported here get rfc3987_syntax at its first use: `ray_path` says why."""
    module: Any = types.ModuleType("rfc3987_syntax")

    def is_valid_syntax(term: str, value: str) -> bool:
        real: Any = importlib.import_module("rfc3987_syntax")
        return bool(real.is_valid_syntax(term, value))

    module.is_valid_syntax = is_valid_syntax
    if is_installed("rfc3987_syntax"):
        sys.modules.setdefault("rfc3987_syntax", module)
    try:
        yield
    finally:
        if sys.modules.get("rfc3987_syntax") is module:
            del sys.modules["rfc3987_syntax"]


@contextlib.contextmanager
def _kernel_as_before() -> Iterator[None]:
    """Undo what `ray.init` leaves behind once the block ends."""
    environment = env.snapshot()
    # Ray sets it in the main thread alone, and nobody else may.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        left = [name for name in env.snapshot() if name not in environment]
        env.update({name: None for name in left if name.startswith(_RAYS_VARIABLES)})
        _reread_settings()


def _reread_settings() -> None:
    """Have Ray in this process read its variables and its token again, as it does only once."""
    # Private names: a Ray that lacks them reads no token.
    with contextlib.suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _addresses_of(hosts: Sequence[Host]) -> dict[str, str]:
    """The address of each host, as a number."""
    problems = []
    addresses = {}
    for host in hosts:
        try:
            info = socket.getaddrinfo(host.address, _ANY_PORT, type=socket.SOCK_DGRAM)
            addresses[host.name] = str(info[0][4][0])
            if not host.is_here:
                _address_towards(addresses[host.name])
        except OSError as error:
            problems.append(
                f"host {host.name}: {host.address!r} cannot be reached "
                f"({error.strerror or error}). Its workers would have no way to the notebook. "
                "Write its address instead of its name, or look at /etc/hosts."
            )
    if problems:
        raise ConfigError(*problems)
    return addresses


def _address_towards(host_address: str) -> str:
    family = socket.AF_INET6 if ":" in host_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: the system only looks up the way.
        probe.connect((host_address, _ANY_PORT))
        return str(probe.getsockname()[0])
