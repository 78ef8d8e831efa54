"""Workers on two machines: how long they take to start, and to get a model and give it back.

    python benchmarks/cluster.py                   every engine beside its peer, about 15 minutes
    python benchmarks/cluster.py --repeats 1 --no-page --output /tmp/quick.json
    python benchmarks/cluster.py --render          the table again, from the stored result

The machines are network namespaces, so it takes root; those of Ray are two raylets. Read
docs/pages/figures.md for what each row means. An engine is a row in SUBJECTS: a function that
runs a part and returns seconds, and the subject that it is compared with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # the machines are those of the tests

import torch  # noqa: E402 - the line above must come first
from cells import cluster_cell  # noqa: E402
from harness.report import Report, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402

from tests.hosts import netns, slurm_cluster  # noqa: E402

CELL = HERE / "cells" / "cluster_cell.py"
RAY_CELL = HERE / "cells" / "ray_cell.py"
PARTS = {
    "start": "start 2 x 2 workers",
    "hand over": "the same with a model of 1 GiB",
    "and back": "the same, trained and back",
}
LIMIT_S = 240


@dataclass(frozen=True)
class Machines:
    """Two machines, and a folder that both see."""

    hosts: list[netns.NamespaceHost]
    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(HERE.parent)} | variables

    def settings(self, **settings: object) -> str:
        path = self.folder / "settings.json"
        path.write_text(json.dumps(settings))
        return str(path)


def seconds_told(node: subprocess.Popen[str]) -> float:
    """What the notebook told."""
    output, errors = node.communicate(timeout=LIMIT_S)
    lines = [line[5:] for line in output.splitlines() if line.startswith("TOLD ")]
    if not lines:
        raise RuntimeError(errors[-800:])
    return float(json.loads(lines[0])["seconds"])


def by_hostfile(machines: Machines, part: str) -> float:
    hostfile = machines.folder / "hostfile"
    hostfile.write_text("alpha slots=2\nbeta slots=2\n")
    shell = netns.remote_shell(machines.folder, machines.hosts)
    settings = machines.settings(hostfile=str(hostfile))
    environment = machines.environment(NBACCEL_SSH=str(shell))
    return seconds_told(machines.hosts[0].python(CELL, part, settings, env=environment))


def by_slurm(machines: Machines, part: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        with slurm_cluster.running_cluster(Path(folder)) as cluster:
            settings = machines.settings(num_processes=4, engine="slurm")
            allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
            node = cluster.host.start(
                *allocation,
                *(sys.executable, str(CELL), part, settings),
                env=machines.environment(SLURM_CONF=cluster.environment["SLURM_CONF"]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            return seconds_told(node)


def by_torchrun(machines: Machines, part: str) -> float:
    """From the commands' start to their end, with files on a disk that both machines see."""
    if part != "start":
        torch.save(cluster_cell.make_model().state_dict(), machines.folder / "model.pt")
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command = ["-m", "torch.distributed.run", *options, "--rdzv-endpoint=alpha:29512"]
    begun = time.monotonic()
    nodes = [
        host.start(
            *(sys.executable, *command, f"--local-addr={host.address}"),
            *(str(CELL), part, str(machines.folder)),
            env=machines.environment(GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in machines.hosts
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=LIMIT_S)
        if node.returncode:
            raise RuntimeError(errors[-800:])
    if part == "and back":
        torch.load(machines.folder / "trained.pt")
    return time.monotonic() - begun


def by_ray(subject: str, machines: Machines, part: str) -> float:
    """From the call to its return; the raylets run before it."""
    command = [sys.executable, str(RAY_CELL), subject, part, str(machines.folder)]
    node = subprocess.Popen(
        command,
        # The names of its sockets have to be short.
        env=machines.environment(RAY_TMPDIR=tempfile.gettempdir()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return seconds_told(node)


TORCHRUN, RAY_TRAIN = "torchrun, elastic", "Ray Train's TorchTrainer"


@dataclass(frozen=True)
class Subject:
    run: Callable[[Machines, str], float]
    peer: str = ""
    missing: str = ""


SUBJECTS = {
    "nbaccel, hostfile": Subject(by_hostfile, TORCHRUN),
    "nbaccel, slurm": Subject(by_slurm, TORCHRUN, slurm_cluster.MISSING),
    TORCHRUN: Subject(by_torchrun),
    "nbaccel, ray": Subject(functools.partial(by_ray, "nbaccel"), RAY_TRAIN),
    RAY_TRAIN: Subject(functools.partial(by_ray, "trainer")),
}


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    with tempfile.TemporaryDirectory() as folder:
        with netns.make_hosts(Path(folder)) as hosts:
            yield Machines(hosts, Path(folder))


def measure(results: Results, repeats: int) -> None:
    results.forget("cluster")
    for repeat in range(repeats):
        for part in PARTS:
            for name, subject in SUBJECTS.items():
                if subject.missing:
                    continue
                say(f"{repeat + 1} of {repeats}: {part}, {name}")
                samples = results.of(f"cluster {part}", name)
                with two_machines() as machines:
                    try:
                        samples.values.append(subject.run(machines, part))
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        samples.errors.append(str(error)[-400:])
        results.note("cluster", repeats=repeat + 1)
        results.save()


def render(results: Results) -> tuple[str, bool]:
    names = [name for name in SUBJECTS if results.get("cluster start", name)]
    lines = [f"| seconds | {' | '.join(PARTS.values())} |", f"| --- |{' --: |' * len(PARTS)}"]
    for name in names:
        cells = [_cell(results, part, name) for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    facts = results.sections["cluster"]
    lines += [
        "",
        f"Taken {facts['taken']}, median of {facts['repeats']}; load {facts['load']}; "
        f"{facts['num_cores']} cores, {facts['memory_gib']} GiB; "
        f"{versions(facts, ('nbaccel', 'torch'))}.",
    ]
    return "\n".join(lines), not any(samples.errors for samples in results.samples.values())


def _cell(results: Results, part: str, name: str) -> str:
    """The median, as a ratio to the peer's, and what failed."""
    samples = results.of(f"cluster {part}", name)
    failed = f" ({len(samples.errors)} failed)" if samples.errors else ""
    if samples.median is None:
        return f"-{failed}"
    peer = SUBJECTS[name].peer
    of_peer = results.of(f"cluster {part}", peer).median if peer else None
    ratio = f", {samples.median / of_peer:.2f}x of {peer.split(',')[0]}" if of_peer else ""
    return f"{samples.median:.1f}{ratio}{failed}"


REPORT = Report("cluster", render, mark="cluster")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    options = parser.parse_args()
    return REPORT.run(options, lambda results: measure(results, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
