"""Torch elastic's rendezvous between two hosts: network namespaces, with kernels and commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import notebook_launcher
from tests.engines.elastic_node import train as train_node
from tests.hosts.netns import NamespaceHost, make_hosts, needs_hosts
from tests.isolation import ROOT
from tests.kernel.kernel import Kernel

pytestmark = [pytest.mark.slow, needs_hosts]

PORT = 29431
QUICK = {"join_timeout": 60, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[NamespaceHost]]:
    folder = tmp_path / "hosts"
    folder.mkdir()
    with make_hosts(folder) as made:
        yield made


def node(host: NamespaceHost, endpoint: str, folder: Path, mode: str, **settings: Any) -> Any:
    options = json.dumps({"rdzv_conf": QUICK, **settings})
    command = [sys.executable, "-m", "tests.engines.elastic_node", endpoint, str(folder), mode]
    return host.start(
        *command,
        options,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def outcome_of(process: Any) -> dict[str, Any]:
    output, errors = process.communicate(timeout=150)
    line = next((line for line in output.splitlines() if line.startswith("OUTCOME")), None)
    assert line is not None, errors
    return json.loads(line.removeprefix("OUTCOME ")) | {"errors": errors}  # type: ignore[no-any-return]


def expected_weights(folder: Path) -> list[float]:
    """Those of one host with four ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    folder.mkdir()
    notebook_launcher(train_node, (model, str(folder), "plain"), 4, timeout=100)
    return model.weight.flatten().tolist()  # type: ignore[no-any-return]


def wait_until(is_so: Any, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_hosts_train_as_one_with_as_many_ranks(hosts, tmp_path, monkeypatch):
    alpha, beta = hosts
    endpoint = f"{alpha.address}:{PORT}"
    pair = node(alpha, endpoint, tmp_path, "plain"), node(beta, endpoint, tmp_path, "plain")
    outcomes = [outcome_of(process) for process in pair]
    ranks = sorted(result["rank"] for outcome in outcomes for result in outcome["results"])
    assert ranks == [0, 1, 2, 3]
    # What the function reads of torchrun's variables, on one host.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one host")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    expected = expected_weights(tmp_path / "one host")
    for outcome in outcomes:
        assert outcome["weights"] == expected != outcome["before"]


def test_a_host_that_is_killed_and_comes_back_takes_part_again(hosts, tmp_path):
    alpha, beta = hosts
    endpoint = f"{alpha.address}:{PORT}"
    first = node(alpha, endpoint, tmp_path, "slow", max_restarts=3)
    second = node(beta, endpoint, tmp_path, "slow", max_restarts=3)
    wait_until((tmp_path / "checkpoint.pt").exists)
    beta.kill()
    second.communicate()
    third = node(beta, endpoint, tmp_path, "slow", max_restarts=3)
    outcomes = [outcome_of(first), outcome_of(third)]
    for outcome in outcomes:
        assert len(outcome["results"]) == 2
        assert all(result["restarts"] >= 1 for result in outcome["results"])
        assert all(result["first step"] >= 1 for result in outcome["results"])
        assert outcome["weights"] == outcomes[0]["weights"]


CELL = """
from nbaccel import notebook_launcher
import torch
from tests.engines.elastic_node import train
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
results = notebook_launcher(
    train, (model, {folder!r}, {mode!r}), num_processes=2, num_nodes=2, max_restarts=2,
    rdzv_backend="c10d", rdzv_endpoint={endpoint!r}, rdzv_id="job",
)
print("RANKS", sorted(result["rank"] for result in results))
print("WEIGHTS", model.weight.flatten().tolist())
"""

SCRIPT = """
import sys, torch
from tests.engines.elastic_node import train
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
result = train(model, sys.argv[1], sys.argv[2])
if result["rank"] % 2 == 0:
    print("WEIGHTS", model.weight.flatten().tolist())
"""


def test_a_kernel_and_a_command_train_together(hosts, tmp_path):
    """A notebook on one host, and on the other the same function as a script."""
    alpha, beta = hosts
    endpoint = f"{alpha.address}:{PORT}"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kernel = Kernel(lambda command: alpha.command(*command))
    try:
        command = beta.start(
            *(sys.executable, "-m", "nbaccel", "launch", "--nproc_per_node", "2", "--nnodes", "2"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "job"),
            *("--max_restarts", "2", "--cpu", str(script), str(tmp_path), "plain"),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        cell = kernel.run(CELL.format(folder=str(tmp_path), mode="plain", endpoint=endpoint))
        cell.check()
        output, errors = command.communicate(timeout=100)
    finally:
        kernel.close()
    assert command.returncode == 0, errors
    weights = {
        line.partition("WEIGHTS")[2].strip()
        for text in (cell.stdout, output)
        for line in text.splitlines()
        if "WEIGHTS" in line
    }
    assert len(weights) == 1, weights


def test_an_address_where_nobody_is_is_named(hosts, tmp_path):
    alpha, _ = hosts
    nowhere = alpha.address.rpartition(".")[0] + ".77"
    settings = {"rdzv_conf": {"join_timeout": 3}}
    outcome = outcome_of(node(alpha, f"{nowhere}:{PORT}", tmp_path, "plain", **settings))
    kind, text, _ = outcome["error"]
    assert kind == "StartupFailed"
    assert f"rdzv_endpoint='{nowhere}:{PORT}'" in text
    assert f"waiting at {nowhere}:{PORT} for 2 nodes" in outcome["errors"]


def test_a_late_host_is_waited_for(hosts, tmp_path):
    alpha, beta = hosts
    # The one that is not there yet serves the rendezvous.
    endpoint = f"{beta.address}:{PORT}"
    first = node(alpha, endpoint, tmp_path, "plain")
    time.sleep(8)
    second = node(beta, endpoint, tmp_path, "plain")
    for outcome in (outcome_of(first), outcome_of(second)):
        assert len(outcome["results"]) == 2
