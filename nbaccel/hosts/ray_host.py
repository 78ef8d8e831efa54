"""What `ssh` or `srun` runs on a host: a node of the Ray cluster that the notebook has started.

It reads where to connect from its standard input, of which nothing is on any command line, and ends
with it: when the notebook hangs up or is gone, all that runs here ends at once.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from nbaccel.base import env

# As a Ray that was installed without its extra `default`: nobody asks its helpers anything, and
# what they import otherwise takes a busy machine more than the 15 s after which a raylet gives up.
# Nor is there a server for its dashboard, for which the head would wait. Hosts import Ray while the
# head starts, and look for it themselves: Ray does so every two seconds.
_START_CODE = """
import socket, sys, time
from ray._raylet import GcsClient
import ray._private.services as services, ray._private.utils as utils
no_extra = lambda: ImportError("not wanted here")
utils.get_dashboard_dependency_error = utils.get_ray_client_dependency_error = no_extra
services.start_api_server = lambda *_, **__: ("", None)
from ray.scripts.scripts import main
address = sys.argv[2].removeprefix("--address=")
host, _, port = address.rpartition(":")
deadline = time.monotonic() + 120
while host and time.monotonic() < deadline:
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
        if GcsClient(address=address).get_all_node_info(timeout=5):
            break
    except Exception:
        pass
    time.sleep(0.1)
main()
"""
OWN_PATH = str(Path(__file__).with_name("ray_path"))
"""Where Ray's processes look for packages first."""
_START_S = 200.0  # For a node to start: it waits for the head, and then a minute for its raylet


def host_resource(name: str) -> str:
    """What Ray calls the resource that no other host has."""
    return f"nbaccel host {name}"


def error_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main() -> NoReturn:
    """Be a node of the cluster until standard input ends, or Ray does."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    import_path = filter(None, [OWN_PATH, env.read("PYTHONPATH")])
    env.update(order["environment"] | {"PYTHONPATH": os.pathsep.join(import_path)})
    # A folder of its own for each node, as Ray's for all: on hosts that share one, two nodes that
    # start at once would take the same socket, and one of them waits a minute for its dead raylet.
    folder = order["head_folder"] or tempfile.mkdtemp(prefix="nbray-")
    began_at = time.monotonic()
    status = _run(order, folder)
    if status == 1 and time.monotonic() - began_at < _START_S:
        # On a busy machine a raylet gives up while it starts, and comes up the second time.
        status = _run(order, folder)
    # The notebook removes the head's, too, unless it was killed.
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(status)


def _run(order: dict[str, Any], folder: str) -> int:
    """Run Ray's processes until the notebook hangs up, or they end; returns their exit status."""
    process = subprocess.Popen(
        [sys.executable, "-c", _START_CODE, *_words(order), f"--temp-dir={folder}"],
        stdin=subprocess.DEVNULL,
    )
    # Imported while it starts.
    from nbaccel.workers.reaping import adopt_orphans, end_descendants

    adopt_orphans()
    exit_fd = os.pidfd_open(process.pid)
    # What it reads is nothing but the end.
    select.select([sys.stdin, exit_fd], [], [])
    status = process.poll()
    end_descendants()
    os.close(exit_fd)
    return status or 0


def _words(order: dict[str, Any]) -> list[str]:
    place = [f"--address={order['head']}"]
    if order["head_folder"]:
        port = order["head"].rpartition(":")[2]
        place = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
    return [
        "start",
        *place,
        f"--node-ip-address={order['address']}",
        # By it alone actors are placed: one is asked for on each host.
        f"--resources={json.dumps({host_resource(order['name']): 1})}",
        "--num-cpus=1",
        "--num-gpus=0",
        # Any ports: hosts may be one machine, and run a Ray of the user's.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        # What workers print comes by the actors.
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--block",
    ]
