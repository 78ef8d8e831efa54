"""Two real hosts (network namespaces): a launch of one notebook with workers on both."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import netns
from tests.hosts.running_script import Notebook, RunningScript

pytestmark = [pytest.mark.slow, netns.needs_hosts]

Hosts = list[netns.NamespaceHost]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with netns.make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def test_training_on_two_hosts_is_training_on_one(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "train+sharded+print+fail")
    told = notebook.told()
    assert told["places"] == [["0", "alpha"], ["1", "alpha"], ["0", "beta"], ["1", "beta"]]
    assert told["losses"] == told["local_losses"]
    assert told["weights"] == told["local_weights"] != told["start"]
    assert told["folders"] == [str(tmp_path)]
    for rank, host in enumerate(("alpha", "alpha", "beta", "beta")):
        assert f"[{rank}] rank {rank} trained on {host}" in notebook.lines

    assert told["rows"] == [8, 8, 8, 6]
    on_hosts, on_one, start = told["sharded"]
    assert on_hosts == on_one != start

    assert told["printed"] == [0, 1, 2, 3]
    for rank in range(4):
        lines = [line for line in notebook.lines if line.startswith(f"[{rank}] rank {rank} has")]
        assert [line.split()[5] for line in lines] == [str(number) for number in range(8000)]

    assert {"ValueError", "WorkerFailed"} <= set(told["kinds"])
    assert "rank 3 of 4 raised ValueError: no luck on beta" in told["text"]
    assert 'raise ValueError(f"no luck on {socket.gethostname()}")' in told["text"]
    assert told["untouched"] is True
    assert [host.processes() for host in hosts] == [[], []]


def test_a_filter_leaves_hosts_and_slots_out(hosts, tmp_path):
    (tmp_path / "hostfile").write_text("gamma slots=2\nalpha slots=3\nbeta slots=1\n")
    told = Notebook(hosts, tmp_path, "filtered", "beta@alpha:2,0").told()
    assert told["launched"] == [["alpha", "0,2"], ["alpha", "0,2"], ["beta", "7"]]
    assert told["pool"] == ["0,2", "0,2", "7"]


def test_stop_reaches_all_hosts_and_the_notebook_goes_on(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "hang")
    notebook.wait_for("hangs", times=4)
    pressed_at = time.time()
    notebook.process.send_signal(signal.SIGINT)
    told = notebook.told()
    assert told["kind"] == "KeyboardInterrupt"
    assert "all 4 workers have been stopped" in told["text"]
    assert told["at"] - pressed_at < 5
    assert sum("tidies up" in line for line in notebook.lines) == 4
    assert told["again"] == ["alpha", "alpha", "beta", "beta"]


def test_a_host_that_is_killed_is_named_and_nothing_is_left(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "hang")
    notebook.wait_for("hangs", times=4)
    killed_at = time.time()
    hosts[1].kill()
    told = notebook.told()
    assert told["kind"] == "WorkerDied"
    assert "host beta was lost" in told["text"]
    assert told["at"] - killed_at < 5
    assert told["again"] == ["alpha", "alpha", "beta", "beta"]
    assert [host.processes() for host in hosts] == [[], []]


def test_a_restart_goes_on_with_the_hosts_that_are_left(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "survive", str(tmp_path))
    notebook.wait_for("hangs", times=4)
    hosts[1].kill()
    told = notebook.told()
    assert told["results"] == [[3, 2, "1"], [3, 2, "1"]]
    assert any("Restart 1 of 1, without beta" in line for line in notebook.errors)


def test_live_workers_on_two_hosts_follow_the_notebook(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "live")
    told = notebook.told()
    assert told["hosts"] == ["alpha", "alpha", "beta", "beta"]
    assert told["beside"] == told["hosts"]
    assert told["remote"] == told["local"]
    assert "rank 2 of 4 raised KeyError: 'beta'" in told["failed"]
    assert "[2] rank 2 on beta" in notebook.lines
    assert [host.processes() for host in hosts] == [[], []]


def test_the_dashboard_knows_memory_and_idleness_of_ranks_on_hosts(hosts, tmp_path):
    told = Notebook(hosts, tmp_path, "weighed", str(tmp_path)).told()
    # Its own bytes, and a process with torch in it: less than a hundred MiB differ between ranks.
    for rank, num_bytes in enumerate(told["bytes"]):
        assert 0 < num_bytes - told["held"][rank] < 1 << 30, rank
    for before, after in itertools.pairwise(told["bytes"]):
        assert after - before > 50 << 20, told["bytes"]
    # The one that computed is never taken for one that waits.
    assert told["doings"] == [""]


def test_a_notebook_that_is_killed_leaves_nothing_on_any_host(hosts, tmp_path):
    notebook = Notebook(hosts, tmp_path, "hang")
    notebook.wait_for("hangs", times=4)
    notebook.process.kill()
    notebook.process.wait()
    deadline = time.monotonic() + 10
    while any(host.processes() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [host.processes() for host in hosts] == [[], []]
    notebook.end()


@pytest.mark.parametrize(
    ("hostfile", "kind", "said"),
    [
        ("alpha slots=1\nnowhere slots=1\n", "ConfigError", "host nowhere: 'nowhere'"),
        ("alpha slots=1\n10.255.255.1 slots=1\n", "ConfigError", "host 10.255.255.1"),
        ("alpha\nbeta slots=0\nalpha slots=2\nalpha slots=2", "ConfigError", "line 4: alpha is"),
        ("", "ConfigError", "names no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_at_once(hosts, tmp_path, hostfile, kind, said):
    (tmp_path / "hostfile").write_text(hostfile)
    told = Notebook(hosts, tmp_path, "refused").told()
    assert (told["kind"], said in told["text"]) == (kind, True), told
    assert told["seconds"] < 10


def test_a_host_that_falls_silent_ends_the_launch_on_both_sides(tmp_path):
    with netns.make_hosts(tmp_path) as hosts:
        notebook = Notebook(hosts, tmp_path, "train_on")
        notebook.wait_for("is pid", times=4)
        unplugged_at = time.time()
        hosts[1].unplug()
        # Its workers see nothing but a network that is gone, and have to end by themselves.
        deadline = time.monotonic() + 60
        while hosts[1].processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert hosts[1].processes() == []
        told = notebook.told()
        assert hosts[0].processes() == []
    assert told["kind"] == "WorkerDied"
    assert "rank 2 of 4 ended: host beta was lost (" in told["text"]
    assert "the network between it and this one" in told["text"]
    # What a signal would mean says nothing of a host.
    assert "ran out of memory" not in told["text"]
    assert told["at"] - unplugged_at < 60
    assert told["untouched"] is True
    assert told["again"] == ["alpha", "alpha"]


SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@pytest.mark.skipif(
    not Path(SSHD).exists() or shutil.which("ssh") is None, reason="needs openssh-server"
)
def test_training_over_ssh(tmp_path):
    own_key, host_key = tmp_path / "own_key", tmp_path / "host_key"
    for key in (own_key, host_key):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
        subprocess.run(command, check=True)
    (tmp_path / "sshd_config").write_text(
        f"HostKey {host_key}\nAuthorizedKeysFile {own_key}.pub\nPidFile none\nUsePAM no\n"
        "StrictModes no\nPermitRootLogin prohibit-password\n"
        f"SetEnv PYTHONPATH={Path(__file__).parents[2]}\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"Host beta\n  IdentityFile {own_key}\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile {tmp_path / 'known_hosts'}\n  LogLevel ERROR\n"
    )
    # sshd refuses to start without its folder, which a machine without it may lack.
    Path("/run/sshd").mkdir(exist_ok=True)
    (tmp_path / "hostfile").write_text("alpha slots=2\nbeta slots=2\n")
    with netns.make_hosts(tmp_path) as hosts:
        daemon = hosts[1].start(SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config"))
        try:
            told = RunningScript(
                hosts[0],
                tmp_path,
                Path(__file__).with_name("notebook.py"),
                "train",
                str(tmp_path / "hostfile"),
                NBACCEL_SSH=f"ssh -F {tmp_path / 'ssh_config'} -o BatchMode=yes",
            ).told()
        finally:
            hosts[1].kill()
            daemon.wait()
    assert told["places"] == [["0", "alpha"], ["1", "alpha"], ["0", "beta"], ["1", "beta"]]
    assert told["weights"] == told["local_weights"] != told["start"]
