"""A raylet of four CPUs that takes jobs, until standard input ends.

One, because several of one machine replace each other's copy of a job's folder. Prints the address
for `ray job submit`, after `JOBS AT`.
"""

from __future__ import annotations

import os
import socket
import sys

from tests.hosts.one_ray import RAY_VARIABLES

os.environ.update(RAY_VARIABLES)

from ray.cluster_utils import Cluster


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    # The port of the agent that takes jobs is the same for all clusters of a machine otherwise.
    ports = {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
    head = {"num_cpus": 4, "include_dashboard": True, **ports}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        print(f"JOBS AT http://{cluster.head_node.webui_url}", flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
