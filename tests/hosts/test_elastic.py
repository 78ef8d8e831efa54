"""Nodes with a notebook each, which meet by torch's rendezvous.

They are network namespaces, or kernels of this machine where none can be made. A node does all runs
that need nothing special one after another, because its start takes longer than they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.calls.test_nodes import free_port, own_address
from tests.hosts import netns
from tests.hosts.running_script import RunningScript
from tests.isolation import ROOT
from tests.kernel.kernel import Kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux"),
]

SCRIPT = Path(__file__).with_name("elastic_node.py")
QUICK = {"join_timeout": 60, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
PORTS = iter(range(29431, 29499))


@dataclass
class ThisMachine:
    """Kernels of this machine, at its real address."""

    address: str
    name: str = "here"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def python(self, script: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        command = [sys.executable, "-u", str(script), *arguments]
        self.started.append(subprocess.Popen(command, text=True, **streams))
        return self.started[-1]

    def kill(self) -> None:
        self.started[-1].kill()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    if not netns.can_make_hosts():
        yield [ThisMachine(own_address()), ThisMachine(own_address())]
        return
    with netns.make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def free_endpoint(machine: Any) -> str:
    """Where a node on that machine serves the rendezvous."""
    is_here = isinstance(machine, ThisMachine)
    return f"{machine.address}:{free_port(machine.address) if is_here else next(PORTS)}"


def node(machine: Any, folder: Path, *runs: dict[str, Any]) -> RunningScript:
    quick_runs = [{"rdzv_conf": QUICK} | run for run in runs]
    return RunningScript(machine, folder, SCRIPT, str(folder), json.dumps(quick_runs))


def wait_until(is_so: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def await_server(machine: Any, endpoint: str) -> None:
    """On one machine the node that comes first serves the rendezvous: it must have begun."""
    if not isinstance(machine, ThisMachine):
        return
    host, _, port = endpoint.rpartition(":")

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    wait_until(answers)


# ------------------------------------------------------------------ two nodes


@dataclass
class Pair:
    """What two nodes told of their runs, and all that they printed."""

    told: list[dict[str, Any]]
    lines: list[str]
    logs: Path

    def outcomes(self, name: str) -> list[dict[str, Any]]:
        return [told[name] for told in self.told]

    def results(self, name: str) -> list[dict[str, Any]]:
        return [result for outcome in self.outcomes(name) for result in outcome["results"]]


@pytest.fixture(scope="module")
def pair(machines: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    first, second = machines

    def run(name: str, **settings: Any) -> dict[str, Any]:
        return {"name": name, "mode": name, "rdzv_endpoint": free_endpoint(first), **settings}

    later = [
        run("uneven", after=str(folder / "go"), log_dir=str(folder / "logs")),
        run("fails once", max_restarts=2),
        run("fails"),
        run("stopped", max_restarts=3),
    ]
    plain = run("plain")
    with contextlib.ExitStack() as clean_up:
        # The one that does not serve the rendezvous comes first, and finds nobody.
        other = node(second, folder, plain, {**later[0], "num_processes": 1}, *later[1:])
        clean_up.callback(other.end)
        other.wait_for("for 2 nodes to join (rdzv_id='plain')")
        one = node(first, folder, plain, {**later[0], "after": ""}, *later[1:])
        clean_up.callback(one.end)
        # Now the other way round.
        one.wait_for("for 2 nodes to join (rdzv_id='uneven')")
        (folder / "go").touch()
        wait_until((folder / "stopped checkpoint.pt").exists)
        other.process.send_signal(signal.SIGINT)
        told = [one.told(), other.told()]
        yield Pair(told, [one.all_lines, other.all_lines], folder / "logs")


@pytest.fixture(scope="module")
def alone(machines: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One node that nobody meets: how it fails, and what one machine trains."""
    folder = tmp_path_factory.mktemp("alone")
    first, second = machines
    unreachable = "192.0.2.1" if isinstance(first, ThisMachine) else "10.250.250.1"
    nowhere = first.address.rpartition(".")[0] + ".77"
    briefly = {"rdzv_conf": {"join_timeout": 2}}
    runs = [
        {"name": "one of 4", "num_nodes": 1, "num_processes": 4, "rdzv_backend": "static"},
        {"name": "one of 3", "num_nodes": 1, "num_processes": 3, "rdzv_backend": "static"},
        {"name": "only node", "num_nodes": 1, "rdzv_endpoint": "localhost:0", "max_restarts": 1},
        {"name": "no name", "rdzv_endpoint": "no-such-host.invalid:29400", **briefly},
        {"name": "no way", "rdzv_endpoint": f"{unreachable}:29400", **briefly},
        {"name": "nowhere", "rdzv_endpoint": f"{nowhere}:29400", **briefly},
        {"name": "no partner", "rdzv_endpoint": free_endpoint(first), **briefly},
        {"name": "no server", "rdzv_endpoint": free_endpoint(second), **briefly},
        {
            "name": "no backend",
            "rdzv_endpoint": free_endpoint(first),
            "rdzv_backend": "paper_plane",
        },
        {"name": "hopeless", "rdzv_endpoint": free_endpoint(first)},
    ]
    running = node(first, folder, *runs)
    with contextlib.closing(contextlib.ExitStack()) as clean_up:
        clean_up.callback(running.end)
        running.wait_for("for 2 nodes to join (rdzv_id='hopeless')")
        running.process.send_signal(signal.SIGINT)
        stopped_at = time.monotonic()
        told = running.told()
        told["seconds after stop"] = time.monotonic() - stopped_at
        told["endpoints"] = {run["name"]: run.get("rdzv_endpoint") for run in runs}
        yield Pair([told], [running.all_lines], folder / "logs")


def weights_of_one(alone: Pair, num_ranks: int) -> list[float]:
    """Those of one machine with as many ranks."""
    [outcome] = alone.outcomes(f"one of {num_ranks}")
    assert len(outcome["results"]) == num_ranks
    return outcome["weights"]  # type: ignore[no-any-return]


def test_two_nodes_train_as_one_with_as_many_ranks(pair: Pair, alone: Pair) -> None:
    results = pair.results("plain")
    assert sorted(result["rank"] for result in results) == [0, 1, 2, 3]
    for result in results:
        assert (result["world"], result["restarts"], result["run"]) == (4, 0, "plain")
        assert result["group"] == [result["rank"] // 2, 2]
    for outcome in pair.outcomes("plain"):
        assert outcome["weights"] == weights_of_one(alone, 4) != outcome["before"]


def test_nodes_may_have_different_numbers_of_workers(pair: Pair, alone: Pair) -> None:
    one, other = pair.outcomes("uneven")
    assert [len(outcome["results"]) for outcome in (one, other)] == [2, 1]
    results = sorted(pair.results("uneven"), key=lambda result: result["rank"])
    assert [(result["rank"], result["world"]) for result in results] == [(0, 3), (1, 3), (2, 3)]
    # Ranks follow the order of the nodes, as torch's agent numbers them.
    assert [result["group"] for result in results] == sorted(result["group"] for result in results)
    assert [result["local"] for result in one["results"]] == [["0", "2"], ["1", "2"]]
    assert [result["local"] for result in other["results"]] == [["0", "1"]]
    for outcome in (one, other):
        assert outcome["weights"] == pytest.approx(weights_of_one(alone, 3), abs=1e-6)
        assert outcome["weights"] != outcome["before"]
    # Files of each node have the names of its own ranks.
    for rank in range(3):
        [log] = pair.logs.glob(f"*/rank_{rank}.stdout.log")
        assert log.read_text() == f"rank {rank} of 3 is through\n"


def test_a_failure_restarts_all_nodes_from_the_checkpoint(pair: Pair, alone: Pair) -> None:
    for result in pair.results("fails once"):
        assert (result["restarts"], result["first step"]) == (1, 3)
    one, other = pair.outcomes("fails once")
    assert one["weights"] == other["weights"]
    assert one["weights"] == pytest.approx(weights_of_one(alone, 4), abs=1e-6)
    told = "raised ValueError: the first round fails. Restart 1 of 2."
    assert any(told in lines for lines in pair.lines)


def test_the_last_failure_ends_all_nodes_with_its_cause(pair: Pair) -> None:
    outcomes = pair.outcomes("fails")
    # The other node tells of it, or of a connection that broke at the same time.
    [own] = [error for *error, is_own_type in (one["error"] for one in outcomes) if is_own_type]
    assert "raised ValueError: every round fails" in own[1].partition("\n")[0]
    for outcome in outcomes:
        assert outcome["weights"] == outcome["before"]


def test_stop_on_one_node_ends_the_others_and_says_so(pair: Pair) -> None:
    one, other = pair.outcomes("stopped")
    assert other["error"][0] == "KeyboardInterrupt"
    assert one["weights"] == one["before"]
    assert "was stopped by its user" in one["error"][1]


def test_a_node_that_is_killed_comes_back_and_training_goes_on(
    machines: list[Any], alone: Pair, tmp_path: Path
) -> None:
    first, second = machines
    slow = {"name": "slow", "mode": "slow", "max_restarts": 3, "rdzv_endpoint": ""}
    slow["rdzv_endpoint"] = endpoint = free_endpoint(first)
    with contextlib.ExitStack() as clean_up:
        stays = node(first, tmp_path, slow)
        clean_up.callback(stays.end)
        await_server(first, endpoint)
        dies = node(second, tmp_path, slow)
        clean_up.callback(dies.end)
        wait_until((tmp_path / "slow checkpoint.pt").exists)
        second.kill()
        back = node(second, tmp_path, slow)
        clean_up.callback(back.end)
        outcomes = [stays.told()["slow"], back.told()["slow"]]
    results = [result for outcome in outcomes for result in outcome["results"]]
    assert sorted(result["rank"] for result in results) == [0, 1, 2, 3]
    assert {result["restarts"] for result in results} <= {1, 2}
    # From the checkpoint, not from the start.
    assert all(result["first step"] >= 1 for result in results)
    assert outcomes[0]["weights"] == outcomes[1]["weights"]
    assert outcomes[0]["weights"] == pytest.approx(weights_of_one(alone, 4), abs=1e-6)


# ------------------------------------------------------------------ one that nobody meets


def failure(alone: Pair, name: str) -> tuple[str, str]:
    [outcome] = alone.outcomes(name)
    return outcome["error"][0], outcome["error"][1]


@pytest.mark.parametrize("name", ["no name", "no way", "nowhere"])
def test_an_address_that_nobody_has_is_named(alone: Pair, name: str) -> None:
    kind, text = failure(alone, name)
    endpoint = alone.told[0]["endpoints"][name]
    assert (kind, f"rdzv_endpoint={endpoint!r}" in text) == ("StartupFailed", True), text
    if name == "no name":
        assert "cannot be reached" in text
    assert alone.outcomes(name)[0]["seconds"] < 10


def test_nodes_that_do_not_come_are_reported_with_those_that_came(alone: Pair) -> None:
    endpoint = alone.told[0]["endpoints"]["no partner"]
    kind, text = failure(alone, "no partner")
    assert kind == "StartupFailed"
    assert f"did not meet at {endpoint} within 2 s: 1 of 2 were there" in text
    assert endpoint.partition(":")[0] in text.partition("ever came")[2]


def test_a_server_that_does_not_come_is_named(alone: Pair) -> None:
    endpoint = alone.told[0]["endpoints"]["no server"]
    # Where both nodes are this machine, it serves the rendezvous itself.
    if not endpoint.startswith(alone.told[0]["endpoints"]["no partner"].partition(":")[0] + ":"):
        text = f"nothing answers at rdzv_endpoint={endpoint!r} after 2 s"
        assert text in failure(alone, "no server")[1]


def test_an_unknown_backend_is_refused(alone: Pair) -> None:
    kind, text = failure(alone, "no backend")
    assert (kind, "paper_plane" in text) == ("ConfigError", True)


def test_one_node_with_a_rendezvous_needs_no_other(alone: Pair) -> None:
    [outcome] = alone.outcomes("only node")
    assert [result["world"] for result in outcome["results"]] == [2, 2]


def test_stop_ends_the_wait_for_other_nodes(alone: Pair, machines: list[Any]) -> None:
    assert failure(alone, "hopeless")[0] == "KeyboardInterrupt"
    assert alone.told[0]["seconds after stop"] < 10
    if not isinstance(machines[0], ThisMachine):
        wait_until(lambda: machines[0].processes() == [], 10)


# ------------------------------------------------------------------ a notebook and a command

CELL = """
from nbaccel import notebook_launcher
import torch
from tests.hosts.elastic_node import train
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
results = notebook_launcher(
    train, (model, {folder!r}, "plain"), num_processes=2, num_nodes=2, max_restarts=2,
    rdzv_backend="c10d", rdzv_endpoint={endpoint!r}, rdzv_id="job",
)
print("RANKS", sorted(result["rank"] for result in results))
print("WEIGHTS", model.weight.flatten().tolist())
"""
NODE_SCRIPT = """
import sys, torch
from tests.hosts.elastic_node import train
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
train(model, sys.argv[1], "plain")
print("WEIGHTS", model.weight.flatten().tolist())
"""


@netns.needs_hosts
def test_a_kernel_and_a_command_train_together(machines: list[Any], tmp_path: Path) -> None:
    """A notebook on one host, and on the other the same function as a script, with one worker."""
    alpha, beta = machines
    endpoint = free_endpoint(alpha)
    script = tmp_path / "script.py"
    script.write_text(NODE_SCRIPT)
    kernel = Kernel(lambda command: alpha.command(*command))
    try:
        command = beta.start(
            *(sys.executable, "-m", "nbaccel", "launch", "--nproc_per_node", "1", "--nnodes", "2"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "job"),
            *("--max_restarts", "2", "--cpu", str(script), str(tmp_path)),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        cell = kernel.run(CELL.format(folder=str(tmp_path), endpoint=endpoint))
        cell.check()
        output, errors = command.communicate(timeout=100)
    finally:
        kernel.close()
    assert command.returncode == 0, errors
    assert "RANKS [0, 1]" in cell.stdout or "RANKS [1, 2]" in cell.stdout
    weights = {
        line.partition("WEIGHTS")[2].strip()
        for text in (cell.stdout, output)
        for line in text.splitlines()
        if "WEIGHTS" in line
    }
    assert len(weights) == 1, weights
