from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from nbaccel.cli import main
from nbaccel.errors import InternalError
from tests.cli.options import FROZEN_FILE, option_lines

HEAVY = ("torch", "numpy", "pydantic", "transformers", "deepspeed", "ray", "huggingface_hub")


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nbaccel", *arguments],
        check=False,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def commands() -> set[str]:
    return {line.split()[1] for line in option_lines() if not line.split()[1].startswith("-")}


def test_the_options_are_those_that_are_frozen():
    """A change of them is a change for users: `python -m tests.cli.options` renews the list."""
    assert FROZEN_FILE.read_text().splitlines() == option_lines()


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys, nbaccel.cli\n"
        "status = nbaccel.cli.main(['--help'])\n"
        f"print(status, sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert all(f" {name} " in done.stdout for name in commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help_without_torch(name, capsys):
    assert main([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Usage: nbaccel" in told
    assert not re.search(r"<\w+( range)?>", told), "types of Python say nothing to people"


def test_bash_completes_commands_and_options():
    environment = {"_NBACCEL_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    done = run(environment={**environment, "COMP_WORDS": "nbaccel "})
    assert commands() <= set(done.stdout.split())
    environment["COMP_CWORD"] = "2"
    done = run(environment={**environment, "COMP_WORDS": "nbaccel merge-weights --rem"})
    assert done.stdout.split() == ["--remove-checkpoint-dir"]


def test_the_version_is_told(capsys):
    from nbaccel import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nbaccel {__version__}\n"


@pytest.mark.parametrize("arguments", [["confi"], ["env", "--jsn"], ["to-fp32"], []])
def test_a_wrong_command_line_is_told_with_the_usage(arguments, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert "Usage: nbaccel" in told.out + told.err


def test_underscores_are_dashes(tmp_path, capsys):
    assert main(["config", "default", "--config_file", str(tmp_path / "a.yaml")]) == 0
    assert (tmp_path / "a.yaml").exists()
    assert capsys.readouterr().err == ""


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
