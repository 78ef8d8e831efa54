"""Nodes with a notebook each, which meet by torch's rendezvous: two network namespaces."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import netns
from tests.hosts.running_script import RunningScript

pytestmark = [pytest.mark.slow, netns.needs_hosts]

SCRIPT = Path(__file__).with_name("elastic_node.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[netns.NamespaceHost]]:
    with netns.make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def node(
    host: netns.NamespaceHost, folder: Path, cell: str, endpoint: str, **variables: str
) -> RunningScript:
    return RunningScript(host, folder, SCRIPT, cell, endpoint, str(folder), **variables)


def test_two_nodes_meet_also_when_one_is_late(
    hosts: list[netns.NamespaceHost], tmp_path: Path
) -> None:
    # The second one first: nobody serves the rendezvous yet.
    late_is_here = node(hosts[1], tmp_path, "train", "alpha:29401")
    time.sleep(5)
    nodes = [node(hosts[0], tmp_path, "train", "alpha:29401"), late_is_here]
    first, second = (running.told() for running in nodes)
    assert min(first["results"] + second["results"])[:3] == [0, 4, 0]
    assert {tuple(result[:2]) for result in first["results"] + second["results"]} == {
        (rank, 4) for rank in range(4)
    }
    assert first["weights"] == second["weights"]


def test_a_node_that_is_killed_comes_back_and_training_goes_on(
    hosts: list[netns.NamespaceHost], tmp_path: Path
) -> None:
    options = {"STEP_S": "1"}
    stays = node(hosts[0], tmp_path, "train", "alpha:29402", **options)
    dies = node(hosts[1], tmp_path, "train", "alpha:29402", **options)
    with contextlib.ExitStack() as clean_up:
        clean_up.callback(stays.end)
        clean_up.callback(dies.end)
        stays.wait_for("step 2 of")
        hosts[1].kill()
        stays.wait_for("Restart 1 of 3")
        back = node(hosts[1], tmp_path, "train", "alpha:29402", **options)
        clean_up.callback(back.end)
        first, second = stays.told(), back.told()
    results = first["results"] + second["results"]
    assert {result[0] for result in results} == {0, 1, 2, 3}
    assert {result[2] for result in results} != {0}  # from the checkpoint, not from the start
    assert first["weights"] == second["weights"]


def test_an_address_of_nobody_is_refused_at_once(
    hosts: list[netns.NamespaceHost], tmp_path: Path
) -> None:
    for endpoint in ("nobody:29400", "10.250.250.1:29400"):
        told = node(hosts[0], tmp_path, "refused", endpoint).told()
        assert told["kind"] == "StartupFailed"
        assert f"rdzv_endpoint={endpoint!r} cannot be reached" in told["text"]
        assert told["seconds"] < 10


def test_nodes_that_do_not_come_are_counted(
    hosts: list[netns.NamespaceHost], tmp_path: Path
) -> None:
    told = node(hosts[0], tmp_path, "refused", "alpha:29403").told()
    assert told["kind"] == "StartupFailed"
    assert "did not meet at alpha:29403 within 4 s: 1 of 2 were there" in told["text"]
    told = node(hosts[1], tmp_path, "refused", "alpha:29404").told()
    assert "nothing answers at rdzv_endpoint='alpha:29404' after 4 s" in told["text"]


def test_stop_ends_the_wait_for_other_nodes(
    hosts: list[netns.NamespaceHost], tmp_path: Path
) -> None:
    alone = node(hosts[0], tmp_path, "train", "alpha:29405")
    time.sleep(6)
    alone.process.send_signal(signal.SIGINT)
    stopped_at = time.monotonic()
    alone.process.wait(20)
    assert time.monotonic() - stopped_at < 10
    alone.end()
    assert "KeyboardInterrupt" in alone.all_lines
    assert hosts[0].processes() == []
