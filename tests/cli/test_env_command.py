from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nbaccel import __version__
from nbaccel.cli import main
from nbaccel.cli.env_command import shown_variables


def test_the_report_names_what_a_bug_report_needs(tmp_path, monkeypatch, capsys):
    import torch

    path = tmp_path / "run.yaml"
    path.write_text("num_processes: 2\nvariables:\n  HF_TOKEN: hf_abc\n")
    monkeypatch.setenv("NBACCEL_CONFIG", str(path))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert main(["env"]) == 0
    told = capsys.readouterr().out
    assert f"- version: {__version__}" in told
    assert f"- torch: {torch.__version__}" in told
    assert "- NCCL_DEBUG: INFO" in told
    assert "num_processes: 2" in told
    assert "CPU cores" in told
    assert "hf_abc" not in told


def test_it_is_one_json_object(capsys):
    assert main(["env", "--json", "--config_file", "/nowhere.yaml"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["configuration file"] == {"path": "/nowhere.yaml", "content": "not there"}
    assert facts["packages"]["torch"]
    assert facts["machine"]["CPU cores"] >= 1


def test_no_package_is_imported_for_it():
    code = (
        "import sys, nbaccel.cli\n"
        "nbaccel.cli.main(['env', '--json'])\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_1", "(set; not shown)"),
        ("NBACCEL_API_KEY", "k", "(set; not shown)"),
        ("RAY_AUTH_MODE", "token", "(set; not shown)"),
        ("HF_ENDPOINT", "https://me:pw@host/x", "https://...@host/x"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("RANK", "3", "3"),
        ("HOME", "somewhere", None),
        ("AWS_SECRET_ACCESS_KEY", "s", None),
    ],
)
def test_secrets_are_left_out(name, value, shown):
    assert shown_variables({name: value}) == ({} if shown is None else {name: shown})
