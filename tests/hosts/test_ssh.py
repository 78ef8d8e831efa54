"""The engine deepspeed by a real sshd, with keys and settings of its own, on the second host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hosts import netns
from tests.hosts.running_script import RunningScript

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.slow,
    netns.needs_hosts,
    pytest.mark.skipif(
        not Path(SSHD).exists() or shutil.which("ssh") is None, reason="needs openssh-server"
    ),
]
SCRIPT = Path(__file__).parents[1] / "hosts" / "notebook.py"


def make_key(path: Path) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def test_training_over_ssh(tmp_path: Path) -> None:
    own_key, host_key = make_key(tmp_path / "own_key"), make_key(tmp_path / "host_key")
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
                SCRIPT,
                "train",
                str(tmp_path / "hostfile"),
                NBACCEL_SSH=f"ssh -F {tmp_path / 'ssh_config'} -o BatchMode=yes",
            ).told()
        finally:
            hosts[1].kill()
            daemon.wait()
    assert told["places"] == [["0", "alpha"], ["1", "alpha"], ["0", "beta"], ["1", "beta"]]
    assert told["weights"] == told["local_weights"] != told["start"]
