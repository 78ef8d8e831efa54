"""``nbaccel launch`` for several machines is the command of the engine that is there for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.base.optional_packages import is_installed
from nbaccel.cli import main
from tests.calls.test_nodes import free_port, interface_of, own_address
from tests.cli import scripts
from tests.needs import DEEPSPEED

TWO_NODES = ["--nproc-per-node", "4", "--nnodes", "2"]
MEETING = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h1:29400", "--rdzv-id", "my job"]
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "


def shown_command(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().out.partition("What would run:\n\n    ")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            [*TWO_NODES, "--node-rank", "1", "--master-addr", "h1", "--cpu"],
            "ACCELERATE_USE_CPU=true torchrun --nproc-per-node 4 --nnodes 2 --node-rank 1 "
            "--master-addr h1 --master-port 29500 train.py --lr 1",
        ),
        (
            [*TWO_NODES, *MEETING, "--max-restarts", "3"],
            f"{OWN_STORE}torchrun --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d "
            "--rdzv-endpoint h1:29400 --rdzv-id 'my job' --max-restarts 3 train.py --lr 1",
        ),
        (
            ["-n", "2", "--nnodes", "1:2", *MEETING, "--rdzv-conf", "join_timeout=9", "-m"],
            f"{OWN_STORE}torchrun --nproc-per-node 1 --nnodes 1:2 --rdzv-backend c10d "
            "--rdzv-endpoint h1:29400 --rdzv-id 'my job' --rdzv-conf join_timeout=9 "
            "-m train.py --lr 1",
        ),
        (
            [*TWO_NODES, "--master-addr", "h1", "--max-restarts", "1", "--log-dir", "logs"],
            f"{OWN_STORE}torchrun --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d "
            "--rdzv-endpoint h1:29400 --rdzv-id none --max-restarts 1 --log-dir logs --tee 3 "
            "train.py --lr 1",
        ),
    ],
    ids=["fixed nodes", "nodes that meet", "one or two", "restarts"],
)
def test_the_command_of_torchrun(words: list[str], command: str, capfd) -> None:
    assert main(["launch", "--dry-run", *words, "train.py", "--lr", "1"]) == 0
    assert shown_command(capfd) == command


@DEEPSPEED
def test_the_command_of_deepspeed(tmp_path: Path, capfd) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 slots=4\nh2 slots=4\n")
    words = ["--hostfile", str(hostfile), "--exclude", "h1:0", "--precision", "bf16"]
    assert main(["launch", "--dry-run", *words, "--max-restarts", "2", "train.py"]) == 0
    shown = capfd.readouterr()
    assert (
        f"deepspeed --hostfile {hostfile} --include h1:1,2,3@h2:0,1,2,3 --no_local_rank "
        "--no_python env ACCELERATE_MIXED_PRECISION=bf16 python -u train.py\n"
    ) in shown.out
    assert "max_restarts=2 has no effect: deepspeed has no option for it" in " ".join(
        shown.err.split()
    )


@pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed: pip install ray")
def test_the_command_of_ray(capfd) -> None:
    words = ["--engine", "ray", "-n", "4", "--env", "A=b"]
    assert main(["launch", "--dry-run", *words, "train.py"]) == 0
    assert shown_command(capfd) == (
        "ray job submit --working-dir . -- env A=b nbaccel launch --num-processes 4 --engine ray "
        "train.py"
    )


@pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed: pip install ray")
def test_in_a_job_of_ray_the_command_starts_the_workers_itself(monkeypatch, capfd) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        # As Ray's job supervisor sets them for the command of a job.
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert main(["launch", "--dry-run", "--engine", "ray", "-n", "4", "train.py"]) == 2
    assert f"nothing answers at RAY_ADDRESS='{address}'" in " ".join(capfd.readouterr().err.split())


def test_without_an_allocation_slurm_says_how_to_get_one(monkeypatch, capfd) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["launch", "--dry-run", "--engine", "slurm", "train.py"]) == 2
    assert 'engine="slurm" needs' in " ".join(capfd.readouterr().err.split())


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = scripts.environment() | {"GLOO_SOCKET_IFNAME": interface_of(own_address())}
    return subprocess.Popen(
        [sys.executable, "-m", "nbaccel", "launch", "--cpu", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_commands_train_together(tmp_path: Path) -> None:
    address = own_address()
    scripts.write(tmp_path / "train.py", scripts.TRAINS)
    meet = ["--master-addr", address, "--master-port", str(free_port(address))]
    words = ["--nproc-per-node", "1", "--nnodes", "2", *meet]
    nodes = [
        start(tmp_path, *words, "--node-rank", str(rank), "train.py", "net.pt") for rank in (0, 1)
    ]
    ended = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    together = ended[0][0].split()
    assert together[0] == "__main__"
    assert ended[1][0] == ""
    # As two workers of one machine do.
    alone = scripts.nbaccel("launch", "--cpu", "-n", "2", "train.py", "net.pt", folder=tmp_path)
    assert together[1] in alone.stdout


@DEEPSPEED
@pytest.mark.slow
def test_the_hosts_of_a_file_run_the_script(tmp_path: Path, monkeypatch) -> None:
    # DeepSpeed looks by ssh whether a host is there.
    scripts.write(tmp_path / "tools" / "ssh", "#!/bin/sh\nhostname\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    scripts.write(tmp_path / "train.py", scripts.PLACES)
    words = ["-H", "hosts", "--env", "A=b c", "train.py", "--lr", "0.5"]
    done = scripts.nbaccel("launch", "--cpu", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2, lr 0.5, []" in done.stdout


def test_a_status_of_the_script_is_that_of_the_command(tmp_path: Path) -> None:
    scripts.write(tmp_path / "train.py", "import sys\nsys.exit(7)")
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words = ["--engine", "elastic", "-n", "1", *meet, "train.py"]
    done = scripts.nbaccel("launch", "--cpu", *words, folder=tmp_path)
    assert done.returncode == 1
    assert "exitcode  : 7" in done.stderr
