"""Flags are stronger than a file: what they replace in it is not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbaccel.cli import main

CLUSTER = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 2
num_processes: 4
machine_rank: 0
"""
OURS = "num_processes: 2\nnum_nodes: 2\n"


def dry_run(path: Path, text: str, *flags: str) -> int:
    path.write_text(text)
    return main(["launch", "--config_file", str(path), *flags, "--cpu", "--dry-run", "train.py"])


@pytest.mark.parametrize("text", [CLUSTER, OURS], ids=["theirs", "ours"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--main_process_ip 10.0.0.1 --machine_rank 0 --num_machines 2", "10.0.0.1"),
        ("--main_process_ip 10.0.0.1 --machine_rank 1", "10.0.0.1"),
        ("--num_machines 1", "num_nodes=1"),
        ("--master-addr node-1", "node-1"),
    ],
)
def test_a_file_without_an_address_goes_with_one_by_flag(tmp_path, capsys, text, flags, told):
    code = dry_run(tmp_path / "f.yaml", text, *flags.split())
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert told.partition("=")[2] or told in shown.out


@pytest.mark.parametrize("text", [CLUSTER, OURS], ids=["theirs", "ours"])
def test_what_no_flag_replaces_is_still_refused(tmp_path, capsys, text):
    assert dry_run(tmp_path / "f.yaml", text, "--mixed_precision", "bf16") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "master_addr cannot be '127.0.0.1' with num_nodes=2" in told


def test_a_wrong_flag_is_not_laid_to_the_file(tmp_path, capsys):
    assert dry_run(tmp_path / "f.yaml", OURS, "--machine_rank", "-3") == 2
    told = capsys.readouterr().err
    assert "f.yaml: node_rank" not in " ".join(told.split())
    assert "node_rank" in told


def test_processes_that_cannot_be_shared_out_are_replaced_by_a_flag(tmp_path, capsys):
    text = CLUSTER.replace("num_processes: 4", "num_processes: 5") + "main_process_ip: 10.0.0.1\n"
    assert dry_run(tmp_path / "f.yaml", text) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "num_processes=5 cannot be divided by num_machines=2" in told
    assert dry_run(tmp_path / "f.yaml", text, "--num_processes", "8") == 0
    # On each of the file's two machines.
    assert "num_processes=4" in plain(capsys.readouterr().out)


def test_processes_of_a_file_are_shared_out_over_the_machines_of_a_flag(tmp_path, capsys):
    text = CLUSTER + "main_process_ip: 10.0.0.1\n"
    assert dry_run(tmp_path / "f.yaml", text, "--num_machines", "4") == 0
    assert "num_processes=1" in plain(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["theirs", "ours"])
def test_a_deepspeed_file_that_is_not_there_is_replaced_by_a_flag(tmp_path, capsys, form):
    document = tmp_path / "ds.json"
    document.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    text = {
        "theirs": "distributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config:\n  deepspeed_config_file: gone.json\n",
        "ours": "num_processes: 2\ndeepspeed: gone.json\n",
    }[form]
    path = tmp_path / "f.yaml"
    assert dry_run(path, text) == 2
    assert "gone.json" in "".join(capsys.readouterr().err.split())
    assert dry_run(path, text, "--deepspeed_config_file", str(document)) == 0
    assert "zero_stage=3" in plain(capsys.readouterr().out)


def plain(shown: str) -> str:
    """A table's cells as `name=value`."""
    return "\n".join("=".join(line.replace("│", " ").split()[:2]) for line in shown.splitlines())
