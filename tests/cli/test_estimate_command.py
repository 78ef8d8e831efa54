from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from nbaccel.cli import main, memory_tables
from nbaccel.config import RunConfig
from nbaccel.notebook.picker.model import PickerModel
from tests.needs import DEEPSPEED_ROW
from tests.notebook.machines import with_gpus
from tests.programs import run_program

CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 100,
    "n_positions": 16,
}


def estimate(capsys, *arguments):
    assert main(["estimate-memory", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def built(tmp_path):
    """A model of transformers, whose configuration is in the folder."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


@pytest.fixture
def stored(tmp_path):
    """Two blocks and a head, 1000 numbers in all."""
    tensors = {
        "model.layers.0.a.weight": torch.zeros(10, 30),
        "model.layers.0.b.weight": torch.zeros(100),
        "model.layers.1.a.weight": torch.zeros(10, 30, dtype=torch.bfloat16),
        "model.layers.1.b.weight": torch.zeros(100, dtype=torch.bfloat16),
        "head.weight": torch.zeros(200),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_model_is_counted_from_its_headers_without_torch(stored):
    code = (
        "import sys\nfrom nbaccel.cli import main\n"
        f"status = main(['estimate-memory', {str(stored)!r}, '--json'])\n"
        "print(status, 'torch' in sys.modules)"
    )
    done = run_program([sys.executable, "-c", code])
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    told = json.loads(done.stdout.rpartition("\n0 ")[0])
    assert (told["parameters"], told["largest_layer_parameters"]) == (1000, 400)
    assert told["loaded"] == [
        {"dtype": "float32", "largest_layer": 1600, "total": 4000, "training": 16000},
        {"dtype": "bfloat16", "largest_layer": 800, "total": 2000, "training": 8000},
        {"dtype": "int8", "largest_layer": 400, "total": 1000, "training": None},
        {"dtype": "int4", "largest_layer": 200, "total": 500, "training": None},
    ]


def test_files_are_those_of_the_index_and_headers_do_not_tell_how_fsdp_wraps_layers(stored, capsys):
    save_file({"old.weight": torch.zeros(5000)}, stored / "stale.safetensors")
    index = {"weight_map": {"head.weight": "model.safetensors"}}
    (stored / "model.safetensors.index.json").write_text(json.dumps(index))
    assert estimate(capsys, stored)["parameters"] == 1000
    single = estimate(capsys, stored / "model.safetensors", "--dtypes", "int4", "fp8")
    assert [row["dtype"] for row in single["loaded"]] == ["int4", "fp8"]
    told = estimate(capsys, stored, "--num-gpus", 2)
    refusals = {row["refusal"] for row in told["trained"] if "FSDP" in row["way"]}
    assert refusals == {"headers do not tell how the layers of its 5 tensors are wrapped"}


@DEEPSPEED_ROW
def test_what_is_told_is_what_the_form_shows(built, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory_tables, "inspect_machine", lambda: with_gpus(2))
    told = estimate(capsys, tmp_path, "--num-gpus", 2, "--mixed-precision", "bf16")
    form = PickerModel(RunConfig(mixed_precision="bf16"), model=built, inventory=with_gpus(2))
    assert [(row["way"], row["per_device"], row["fits"]) for row in told["trained"]] == [
        (one.name, one.need and one.need.estimate.device.peak, one.can_be_taken)
        for one in form.candidates()
    ]


def test_a_model_of_transformers_is_built_without_weights(built, tmp_path, capsys):
    told = estimate(capsys, tmp_path, "--num-gpus", 2)
    num_parameters = sum(p.numel() for p in built.parameters())
    assert told["parameters"] == num_parameters
    assert "GPT2LMHeadModel" in told["read_from"]
    rows = {row["way"]: row["per_device"] for row in told["trained"]}
    # DDP's buckets are a second copy of the gradients.
    assert rows["one copy each (DDP)"] == 5 * 4 * num_parameters


@DEEPSPEED_ROW
@pytest.mark.parametrize("free", [15, None])
def test_a_terminal_of_80_columns_has_a_line_for_each_way(free, stored, capsys, monkeypatch):
    """With GPUs that are here, a sign says what fits; of others nothing is known."""
    machine = with_gpus(2, total=16, free=free) if free else with_gpus(0)
    monkeypatch.setattr(memory_tables, "inspect_machine", lambda: machine)
    assert main(["estimate-memory", str(stored), "--num-gpus", "2"]) == 0
    told = capsys.readouterr().out
    assert "1,000 parameters (headers of safetensors)" in told
    assert "Activations are not in it" in told
    lines = told.partition("Trained with Adam on 2 GPUs")[2].splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert any("ZeRO-3" in line for line in lines)
    assert any("✓" in line for line in lines) == bool(free)
    assert any("★" in line for line in lines) == bool(free)


def test_accelerate_finds_the_same_sizes_and_a_kind_of_model_has_its_default(
    built, tmp_path, capsys
):
    estimating = pytest.importorskip("accelerate.commands.estimate")
    told = estimate(capsys, tmp_path, "--dtypes", "float32", "float16", "int8", "int4")
    total, (largest, _) = estimating.calculate_maximum_sizes(built)
    ours = {row["dtype"]: row for row in told["loaded"]}
    assert (ours["float32"]["total"], ours["float32"]["largest_layer"]) == (total, largest)
    for dtype in ("float32", "float16"):
        theirs = max(estimating.estimate_training_usage(total, dtype).values())
        assert ours[dtype]["training"] == theirs
    told = estimate(capsys, "gpt2")
    assert told["parameters"] == 124_439_808  # OpenAI's GPT-2
    assert any("default of this kind" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gtp2"], "'gtp2' is no file or folder here, and no kind of model of transformers. Did"),
        (["me/mine"], "Fetch it first: hf download me/mine --local-dir FOLDER"),
        (["empty"], "has neither config.json nor safetensors"),
        (["broken.safetensors"], "cannot be read as safetensors"),
        (["own"], "cannot be built"),
        (["x", "--dtypes", "int8", "float33"], "'float33' is no format here"),
        (
            ["x", "--mixed-precision", "fp9"],
            "--mixed-precision='fp9' is no format here. Did you mean",
        ),
        (["x", "--library-name", "timm"], "library_name='timm' is not supported"),
    ],
)
def test_what_cannot_be_read_is_told(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 30)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.json").write_text('{"model_type": "of_nobody"}')
    assert main(["estimate-memory", *arguments]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
