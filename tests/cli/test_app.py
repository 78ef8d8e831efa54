from __future__ import annotations

import json
import os
import re
import sys

import pytest

from nbaccel import __version__
from nbaccel.cli import main
from nbaccel.cli.commands import shown_variables
from nbaccel.config import RunConfig
from nbaccel.errors import InternalError
from tests.cli.options import FROZEN_FILE, option_lines
from tests.programs import run_program

HEAVY = (
    *("torch", "numpy", "pydantic", "transformers", "deepspeed", "ray", "huggingface_hub"),
    "IPython",
)


def commands() -> set[str]:
    return {line.split()[1] for line in option_lines() if not line.split()[1].startswith("-")}


def test_the_options_are_those_that_are_frozen():
    """A change of them is a change for users: `python -m tests.cli.options` renews the list."""
    assert FROZEN_FILE.read_text().splitlines() == option_lines()


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["--help"], HEAVY),
        (["launch", "--help"], ("torch", "IPython")),
        (["env", "--json"], ("torch", "numpy", "transformers", "deepspeed")),
        (["status"], ("torch", "numpy", "IPython", "ipywidgets")),
    ],
)
def test_what_answers_at_once_imports_nothing_heavy(arguments, packages):
    code = (
        "import sys, nbaccel.cli\n"
        f"status = nbaccel.cli.main({arguments!r})\n"
        f"print(status, sorted(set({packages!r}) & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code], env={**os.environ, "COLUMNS": "200"})
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    if arguments == ["--help"]:
        assert all(f" {name} " in done.stdout for name in commands())
    if arguments == ["launch", "--help"]:
        assert all(f"--{name.replace('_', '-')}" in done.stdout for name in RunConfig.model_fields)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help_without_torch(name, capsys):
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Usage: nbaccel" in told
    assert not re.search(r"<\w+( range)?>", told), "types of Python say nothing to people"


@pytest.mark.parametrize(
    ("words", "number", "told"),
    [
        ("nbaccel ", "1", commands()),
        ("nbaccel merge-weights --rem", "2", {"--remove-checkpoint-dir"}),
    ],
)
def test_bash_completes_commands_and_options(words, number, told):
    variables = {"_NBACCEL_COMPLETE": "complete_bash", "COMP_CWORD": number, "COMP_WORDS": words}
    done = run_program([sys.executable, "-m", "nbaccel"], check=False, env=os.environ | variables)
    assert told <= set(done.stdout.split())


def test_the_version_is_told_and_underscores_are_dashes(capsys, tmp_path):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nbaccel {__version__}\n"
    assert main(["config", "default", "--config_file", str(tmp_path / "a.yaml")]) == 0
    assert (tmp_path / "a.yaml").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["confi"], ["env", "--jsn"], ["to-fp32"], []])
def test_a_wrong_command_line_is_told_with_the_usage(arguments, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert "Usage: nbaccel" in told.out + told.err


def test_failures_have_their_own_status(tmp_path, monkeypatch, capsys):
    """2 is for what the user can correct, 1 for what failed; a bug keeps its traceback."""
    from nbaccel.errors import CheckpointFailed, ConfigError
    from nbaccel.utils import fsdp_utils

    arguments = ["merge-weights", str(tmp_path), str(tmp_path / "out")]
    for error, status in ((ConfigError("a is 3."), 2), (CheckpointFailed("b is 4."), 1)):

        def fail(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(fsdp_utils, "merge_fsdp_weights", fail)
        assert main(arguments) == status
        assert capsys.readouterr().err == f"nbaccel: {error}\n"

    def break_down(*arguments, **options):
        raise InternalError("c is 5.")

    monkeypatch.setattr(fsdp_utils, "merge_fsdp_weights", break_down)
    with pytest.raises(InternalError):
        main(arguments)


def test_the_report_names_what_a_bug_report_needs_also_as_json(tmp_path, monkeypatch, capsys):
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
    assert main(["env", "--json", "--config_file", "/nowhere.yaml"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["configuration file"] == {"path": "/nowhere.yaml", "content": "not there"}
    assert facts["packages"]["torch"]
    assert facts["machine"]["CPU cores"] >= 1


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
