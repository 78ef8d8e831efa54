"""Nodes that meet by torch elastic's rendezvous: kernels of this machine, at its real address."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import ConfigError, notebook_launcher
from nbaccel.errors import StartupFailed
from tests.engines.elastic_node import train as train_node
from tests.isolation import ROOT
from tests.launch.test_nodes import free_port, own_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux"),
]

QUICK = {"rdzv_conf": {"join_timeout": 60, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}}


class Node:
    """A process that takes part."""

    def __init__(self, endpoint: str, folder: Path, mode: str, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.engines.elastic_node"),
                *(endpoint, str(folder), mode, json.dumps(QUICK | settings)),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors = ""
        self.output = ""

    def outcome(self, timeout_s: float = 120) -> dict[str, Any]:
        self.output, self.errors = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, self.errors
        line = next(line for line in self.output.splitlines() if line.startswith("OUTCOME"))
        return json.loads(line.removeprefix("OUTCOME "))  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.kill()
        # Closes the pipes, too.
        self.process.communicate()


@pytest.fixture
def endpoint() -> str:
    address = own_address()
    return f"{address}:{free_port(address)}"


@pytest.fixture
def nodes(endpoint: str, tmp_path: Path) -> Iterator[Any]:
    started: list[Node] = []

    def start(mode: str, **settings: Any) -> Node:
        started.append(Node(endpoint, tmp_path, mode, **settings))
        return started[-1]

    yield start
    for node in started:
        node.kill()


def expected_weights(tmp_path: Path) -> list[float]:
    """Those of one host with four ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    folder = tmp_path / "one host"
    folder.mkdir()
    os.environ["TORCHELASTIC_RUN_ID"] = "one host"
    os.environ["GROUP_WORLD_SIZE"] = "1"
    try:
        notebook_launcher(train_node, (model, str(folder), "plain"), 4, timeout=100)
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"], os.environ["GROUP_WORLD_SIZE"]
    return model.weight.flatten().tolist()  # type: ignore[no-any-return]


def test_two_nodes_train_as_one_host_with_as_many_ranks(nodes, tmp_path):
    outcomes = [node.outcome() for node in (nodes("plain"), nodes("plain"))]
    ranks = sorted(result["rank"] for outcome in outcomes for result in outcome["results"])
    assert ranks == [0, 1, 2, 3]
    for outcome in outcomes:
        assert outcome["weights"] == outcomes[0]["weights"] != outcome["before"]
        for result in outcome["results"]:
            assert (result["world"], result["restarts"], result["run"]) == (4, 0, "job")
            assert result["group"] == [str(result["rank"] // 2), "2"]
    assert outcomes[0]["weights"] == expected_weights(tmp_path)


def test_a_failure_restarts_all_nodes_from_the_checkpoint(nodes, tmp_path):
    pair = nodes("fails once", max_restarts=2), nodes("fails once", max_restarts=2)
    outcomes = [node.outcome() for node in pair]
    for outcome in outcomes:
        assert {result["restarts"] for result in outcome["results"]} == {1}
        assert {result["first step"] for result in outcome["results"]} == {3}
        assert outcome["weights"] == outcomes[0]["weights"]
    assert outcomes[0]["weights"] == pytest.approx(expected_weights(tmp_path), abs=1e-6)
    told = [node.errors for node in pair]
    assert any("raised ValueError: the first round fails. Restart 1 of 2." in text for text in told)


def test_the_last_failure_ends_all_nodes_with_its_cause(nodes):
    pair = nodes("fails"), nodes("fails")
    outcomes = [node.outcome() for node in pair]
    errors = {outcome["error"][1].partition("\n")[0]: outcome["error"] for outcome in outcomes}
    (own,) = [text for text in errors if "raised ValueError: every round fails" in text]
    assert errors[own][2], "it is of the worker's type"
    for outcome in outcomes:
        assert outcome["weights"] == outcome["before"]


def test_a_node_that_is_killed_and_comes_back_takes_part_again(nodes, endpoint, tmp_path):
    first = nodes("slow", max_restarts=3)
    # The one that serves the rendezvous: it must not be the one that is killed.
    wait_until(lambda: answers(endpoint))
    second = nodes("slow", max_restarts=3)
    wait_until((tmp_path / "checkpoint.pt").exists)
    second.kill()
    third = nodes("slow", max_restarts=3)
    outcomes = [first.outcome(), third.outcome()]
    ranks = sorted(result["rank"] for outcome in outcomes for result in outcome["results"])
    assert ranks == [0, 1, 2, 3]
    for outcome in outcomes:
        assert {result["restarts"] for result in outcome["results"]} <= {1, 2}
        assert all(result["first step"] >= 1 for result in outcome["results"])
        assert outcome["weights"] == outcomes[0]["weights"]
    assert outcomes[0]["weights"] == pytest.approx(expected_weights(tmp_path), abs=1e-6)


def answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def wait_until(is_so: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_that_joins_late_is_waited_for_and_told_of(nodes, endpoint):
    first = nodes("plain")
    wait_until(lambda: answers(endpoint))
    time.sleep(2.5)
    second = nodes("plain")
    assert len(first.outcome()["results"]) == len(second.outcome()["results"]) == 2
    assert "for 2 nodes to join (rdzv_id='job')" in first.errors


def test_stop_on_one_node_ends_the_others_and_says_so(nodes, tmp_path):
    first, second = nodes("stopped", max_restarts=3), nodes("stopped", max_restarts=3)
    wait_until((tmp_path / "checkpoint.pt").exists)
    second.process.send_signal(signal.SIGINT)
    assert second.outcome()["error"][0] == "KeyboardInterrupt"
    outcome = first.outcome()
    assert outcome["weights"] == outcome["before"]
    assert "was stopped by its user" in outcome["error"][1] + first.errors


def test_nodes_that_differ_are_refused_with_both_values(nodes):
    pair = nodes("plain"), nodes("plain", num_processes=1)
    for node in pair:
        kind, text, _ = node.outcome()["error"]
        assert kind == "StartupFailed"
        assert "the nodes differ in num_processes" in text
        assert ": 2" in text
        assert ": 1" in text


def test_nodes_that_do_not_come_are_reported_with_those_that_came(endpoint):
    with pytest.raises(StartupFailed) as caught:
        launch(endpoint, rdzv_conf={"join_timeout": 2})
    text = str(caught.value)
    assert f"did not meet at {endpoint} within 2 s: 1 of 2 were there" in text
    assert endpoint.partition(":")[0] in text.partition("ever came")[2]


@pytest.mark.parametrize("where", ["no-such-host.invalid:29400", "192.0.2.1:29400"])
def test_a_wrong_address_is_named(where):
    with pytest.raises(StartupFailed) as caught:
        launch(where, rdzv_conf={"join_timeout": 3})
    assert f"rdzv_endpoint='{where}'" in str(caught.value)


def test_an_unknown_backend_is_refused(endpoint):
    with pytest.raises(ConfigError, match="paper_plane"):
        launch(endpoint, rdzv_backend="paper_plane")


def launch(where: str, **settings: Any) -> None:
    options = {"num_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": where} | settings
    notebook_launcher(print, (), 2, **options)


def test_one_node_with_a_rendezvous_needs_no_other():
    results = notebook_launcher(
        os.getpid, (), 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1
    )
    assert len(set(results)) == 2
