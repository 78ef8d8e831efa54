"""The Ray engine on a cluster of real raylets: workers on several nodes, as on one machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from nbaccel import ConfigError, notebook_launcher
from nbaccel.base.optional_packages import is_installed
from nbaccel.hosts.ray_engine import RayEngine
from tests.hosts.one_ray import one_cluster_at_a_time
from tests.isolation import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed: pip install ray"),
]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ray")
    with one_cluster_at_a_time():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.ray_scenes", str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=440)
        except subprocess.TimeoutExpired:
            # With its raylets, which would stay for the tests that come next.
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
    lines = [line for line in stdout.splitlines() if line.startswith("SCENE")]
    outcomes = dict(json.loads(line.removeprefix("SCENE ")) for line in lines)
    assert len(outcomes) == 4, (stdout[-3000:], stderr[-5000:])
    return outcomes


def test_workers_on_several_nodes_train_as_those_of_one_machine(scenes):
    outcome = scenes["trained"]
    assert outcome["ranks"] == [0, 1, 2, 3], outcome
    assert outcome["templates"] >= 2
    assert outcome["is trained"]
    assert outcome["equals one host"]
    for rank in range(4):
        assert f"rank {rank} has trained" in outcome["output"]
    lines = [line.removeprefix("[3] ") for line in outcome["output"].splitlines()]
    shown = [line for line in lines if line.partition(" ")[0] in ("before", "picture", "after")]
    assert shown == [f"{what} {i}" for i in range(5) for what in ("before", "picture", "after")]
    assert "ray" in outcome["plan"]


def test_a_large_model_goes_through_the_object_store_once_per_launch(scenes):
    outcome = scenes["carried"]
    assert len(outcome["stored"]) == 2, outcome
    assert outcome["first"] == [outcome["expected"]] * 4
    assert outcome["after"] != outcome["expected"]
    assert outcome["second"] == [outcome["after"]] * 4


def test_more_workers_than_the_cluster_has_are_refused_at_once(scenes):
    outcome = scenes["too many"]
    assert outcome["type"] == "ConfigError", outcome
    assert "is more than the cluster has" in outcome["text"]
    assert "2 CPU" in outcome["text"]


def test_a_node_that_is_lost_is_named_and_replaced(scenes):
    outcome = scenes["lost"]
    for result in outcome["results"]:
        assert result["world"] == 4
        assert result["restarts"] >= 1
        assert result["first step"] > 0
    assert "was lost" in outcome["errors"]
    assert outcome["victim"][:6] in outcome["errors"]
    assert "Restart 1 of 2" in outcome["errors"]


def test_nothing_is_left_on_the_cluster(scenes):
    for name, outcome in scenes.items():
        assert outcome["actors left"] == [], name
        assert outcome["groups left"] == [], name


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch):
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"nothing answers at RAY_ADDRESS='{address}'"):
            RayEngine().connect()


def test_a_notebook_without_a_cluster_is_told_how_to_connect():
    with pytest.raises(ConfigError, match=r'ray.init\(address="auto"\)'):
        notebook_launcher(print, (), 2, engine="ray")
