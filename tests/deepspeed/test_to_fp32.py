"""The command: quick to answer, small in memory, and clear when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nbaccel import load_fp32_state_dict
from nbaccel.cli import main
from tests.isolation import ROOT

NUM_ELEMENTS = 32 * 2**20  # 128 MiB of fp32


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "nbaccel"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """As stage 0 writes it; its one large layer is more than is allowed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    module = {"big": torch.full((NUM_ELEMENTS,), 2.0), "small": torch.rand(3)}
    states = {"module": module, "buffer_names": []}
    torch.save(states, folder / "global_step1" / "mp_rank_00_model_states.pt")
    return folder


def test_help_answers_without_torch_and_names_the_command():
    code = (
        "import sys, nbaccel.cli\n"
        "print(nbaccel.cli.main(['--help']))\n"
        "print({'torch', 'numpy', 'pydantic', 'huggingface_hub', 'deepspeed'} & set(sys.modules))"
    )
    done = run(code=code)
    assert "to-fp32" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["0", "set()"]


@pytest.mark.slow
def test_a_conversion_is_small_in_memory_and_tells_what_it_wrote(checkpoint, tmp_path):
    code = (
        "import json, sys\nfrom nbaccel.cli import main\nimport torch\n"
        "def peak(): return next(int(line.split()[1]) // 1024\n"
        "    for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "status = main(sys.argv[1:])\n"
        "facts = {'status': status, 'mib': peak() - before, 'heavy': 'deepspeed' in sys.modules}\n"
        "print(json.dumps(facts))"
    )
    done = run("to-fp32", str(checkpoint), str(tmp_path / "out"), code=code)
    assert done.returncode == 0, done.stderr
    told, facts = done.stdout.splitlines()
    assert told.startswith("2 tensors, 128.0 MiB, in 1 file (model.safetensors) in ")
    found = json.loads(facts)
    assert (found["status"], found["heavy"]) == (0, False)
    assert found["mib"] < 50, "a fraction of the model"
    assert load_file(tmp_path / "out" / "model.safetensors")["big"].unique().tolist() == [2.0]


def test_options_reach_the_conversion(checkpoint, tmp_path, capsys):
    arguments = ["to-fp32", str(checkpoint), str(tmp_path / "out"), "--tag", "global_step1"]
    assert main([*arguments, "--max-shard-size", "50MB"]) == 0
    assert "in 3 files (model-00001-of-00002.safetensors … model.safe" in capsys.readouterr().out
    assert main([*arguments, "--exclude-frozen-parameters"]) == 2
    assert "does not tell which of its 2 weights" in " ".join(capsys.readouterr().err.split())


def test_a_mistake_is_one_paragraph_and_no_traceback(tmp_path):
    done = run("to-fp32", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("nbaccel: ")
    assert "nowhere does not exist" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= max(100, len(str(tmp_path)) + 10)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_is_told_as_a_shell_tells_it(monkeypatch, capsys):
    from nbaccel.deepspeed.weights import converting

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "zero_to_fp32", interrupted)
    assert main(["to-fp32", "a", "b"]) == 130
    assert capsys.readouterr().err == "nbaccel: interrupted\n"


def test_the_command_is_installed_under_its_name():
    text = Path(ROOT, "pyproject.toml").read_text()
    assert 'nbaccel = "nbaccel.cli:main"' in text
    assert find_spec("nbaccel.__main__") is not None


def test_tied_names_are_said_with_what_loads_them(tmp_path, capsys):
    step = tmp_path / "checkpoint" / "global_step1"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step1")
    weight = torch.rand(3, 2)
    states = {"module": {"words.weight": weight, "lm_head.weight": weight}, "buffer_names": []}
    torch.save(states, step / "mp_rank_00_model_states.pt")
    assert main(["to-fp32", str(step.parent), str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Tied weights are in it under one name (lm_head.weight is words.weight)" in told
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["words.weight"]
    assert {*load_fp32_state_dict(step.parent)} == {"words.weight", "lm_head.weight"}
