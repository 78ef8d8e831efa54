"""The command: quick to answer, small in memory, and clear when something is wrong."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from nbaccel import load_fp32_state_dict
from nbaccel.cli import main
from tests.isolation import ROOT
from tests.programs import run_program

NUM_ELEMENTS = 32 * 2**20  # 128 MiB of fp32


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
    words = ["to-fp32", str(checkpoint), str(tmp_path / "out")]
    done = run_program([sys.executable, "-c", code, *words], cwd=ROOT)
    told, facts = done.stdout.splitlines()
    assert told.startswith("2 tensors, 128.0 MiB, in 1 file (model.safetensors) in ")
    found = json.loads(facts)
    assert (found["status"], found["heavy"]) == (0, False)
    assert found["mib"] < 50, "a fraction of the model"
    assert load_file(tmp_path / "out" / "model.safetensors")["big"].unique().tolist() == [2.0]


def test_options_reach_the_conversion(checkpoint, tmp_path, capsys):
    arguments = ["to-fp32", str(checkpoint), str(tmp_path / "out"), "--tag", "global_step1"]
    assert main([*arguments, "--max-shard-size", "50MB"]) == 0
    assert "in 3 files (model-00001-of-00002.safetensors, model-00002-of" in capsys.readouterr().out
    assert main([*arguments, "--exclude-frozen-parameters"]) == 2
    assert "does not tell which of its 2 weights" in " ".join(capsys.readouterr().err.split())


def test_tied_names_are_in_the_file_once(tmp_path):
    step = tmp_path / "checkpoint" / "global_step1"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step1")
    weight = torch.rand(3, 2)
    states = {"module": {"words.weight": weight, "lm_head.weight": weight}, "buffer_names": []}
    torch.save(states, step / "mp_rank_00_model_states.pt")
    assert main(["to-fp32", str(step.parent), str(tmp_path / "out")]) == 0
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["words.weight"]
    assert {*load_fp32_state_dict(step.parent)} == {"words.weight", "lm_head.weight"}
