from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.cli import main
from nbaccel.config import RunConfig, load_config_file
from tests.needs import DEEPSPEED_ROW

HAS_ENGINES = "engine" in RunConfig.model_fields
FILES = Path(__file__).parents[1] / "config/accelerate_yaml"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where the command keeps its file."""
    path = tmp_path / "kept/run.yaml"
    monkeypatch.setenv("NBACCEL_CONFIG", str(path))
    return path


@pytest.fixture
def answer(monkeypatch, capsys):
    """Runs the command with these lines as its input; gives the status and what was shown."""
    # Wide, so that nothing is folded.
    monkeypatch.setenv("COLUMNS", "300")

    def give(arguments, *lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(arguments)
        told = capsys.readouterr()
        return status, " ".join((told.out + told.err).split())

    return give


def config_of(file):
    return load_config_file(file).config


def test_answers_or_empty_lines_become_the_file(file, answer):
    status, told = answer(["config"], "n", "cpu", "2", "-", "bf16", "auto", "4", "n")
    assert status == 0, told
    assert config_of(file) == RunConfig(
        num_processes=2, device="cpu", mixed_precision="bf16", gradient_accumulation_steps=4
    )
    assert "2 CPU workers" in told
    assert f"Written to {file}" in told
    file.unlink()
    status, told = answer(["config"], *[""] * 8)
    assert status == 0, told
    assert config_of(file).changed(num_processes=None, device="auto") == RunConfig(
        gradient_accumulation_steps=1
    )


def test_a_wrong_answer_is_asked_again_with_the_rule(file, answer):
    status, told = answer(
        ["config"], "n", "cuda", "cpu", "two", "2", "0", "1", "f16", "no", "auto", "", "n"
    )
    assert status == 0, told
    assert "'cuda' is none of auto, cpu" in told
    assert "num_processes must be a whole number of at least 1, or None: got 'two'" in told
    assert "threads_per_process must be" in told
    assert config_of(file).threads_per_process == 1


def test_several_machines_are_checked_against_each_other(file, answer):
    status, told = answer(
        ["config"],
        "y",
        *("auto",) * HAS_ENGINES,
        *("2", "2", "1", "3", "static", "localhost", "10.0.0.7", "29400"),
        *("cpu", "-", "no", "auto", "", "n"),
    )
    assert status == 0, told
    assert "node_rank must be below num_nodes" in told
    assert "master_addr cannot be 'localhost'" in told
    config = config_of(file)
    assert (config.num_nodes, config.node_rank, config.num_processes) == (2, 1, 3)
    assert (config.master_addr, config.use_port) == ("10.0.0.7", 29400)


@pytest.mark.skipif(not HAS_ENGINES, reason="this version has no engines for several machines")
def test_an_engine_that_starts_all_machines_is_not_asked_for_addresses(file, answer):
    lines = ("y", "deepspeed", "hosts.txt", "cpu", "4", "-", "no", "auto", "", "n")
    status, told = answer(["config"], *lines)
    assert status == 0, told
    config = config_of(file)
    assert (config.engine, config.hostfile) == ("deepspeed", "hosts.txt")
    assert (config.num_nodes, config.num_processes) == (1, 4)


@DEEPSPEED_ROW
def test_zero_with_offloading_or_by_a_file_of_deepspeed(file, answer, tmp_path):
    status, told = answer(
        ["config"],
        *("n", "cpu", "2", "-", "bf16", "deepspeed", "n", "3", "2", "x", "0.5"),
        *("cpu", "nvme", "", "/tmp", "y", "n"),  # an empty answer names no folder
    )
    assert status == 0, told
    assert "'x' is no number above 0" in told
    config = config_of(file)
    assert (config.zero_stage, config.gradient_accumulation_steps) == (3, 2)
    assert config.deepspeed == {
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    file.unlink()
    document = tmp_path / "zero.json"
    document.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 2.0}')
    lines = ("n", "cpu", "1", "-", "no", "deepspeed", "y", str(tmp_path / "no.json"), str(document))
    status, told = answer(["config"], *lines, "n")
    assert status == 0, told
    assert "no.json' cannot be read" in told
    assert config_of(file).zero_stage == 1


def test_sharding_eight_bits_and_compilation(file, answer):
    status, told = answer(
        ["config", "--mixed-precision", "fp8"],
        *("n", "cpu", "2", "-", "native", "fsdp", "n", "y", "size_based_wrap", "0", "1000"),
        *("FULL_STATE_DICT", "y", "2", "y", "eager", "1", "y", "n", "y"),
    )
    assert status == 0, told
    config = config_of(file)
    assert config.fp8.backend == "native"
    assert config.fsdp == {
        "reshard_after_forward": False,
        "cpu_offload": True,
        "auto_wrap_policy": "size_based_wrap",
        "min_num_params": 1000,
        "state_dict_type": "FULL_STATE_DICT",
        "activation_checkpointing": True,
    }
    assert config.dynamo == {
        "backend": "eager",
        "mode": "reduce-overhead",
        "dynamic": True,
        "use_regional_compilation": True,
    }


def test_input_that_ends_or_what_the_machine_lacks_writes_nothing(file, answer):
    status, told = answer(["config"], "n")
    assert status == 2
    assert "nbaccel config default" in told
    assert not file.exists()
    assert "Did you mean 'bf16'" in answer(["config", "default", "--mixed-precision", "bf17"])[1]
    assert not file.exists()
    file.parent.write_text("a file where the folder would be")
    assert "cannot be written" in answer(["config", "default"])[1]


def test_ctrl_c_writes_nothing(tmp_path):
    path = tmp_path / "run.yaml"
    # Both streams are pipes, so that the question is seen before the signal is sent.
    asked = subprocess.Popen(
        [sys.executable, "-m", "nbaccel", "config", "--config-file", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "NBACCEL_CONFIG": str(tmp_path / "other")},
    )
    shown = b""
    while b"several machines" not in shown:
        next_byte = asked.stdout.read(1)
        assert next_byte, "it has ended without a question"
        shown += next_byte
    asked.send_signal(signal.SIGINT)
    _, errors = asked.communicate(timeout=60)
    assert (asked.returncode, errors) == (130, b"nbaccel: interrupted\n")
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_is_there_is_replaced_only_after_a_look(file, answer):
    assert main(["config", "default"]) == 0
    before = file.read_text()
    status, told = answer(["config", "default", "--mixed-precision", "bf16"], "n")
    assert (status, file.read_text()) == (1, before)
    assert "+mixed_precision: bf16" in told
    assert "Nothing was written" in told
    status, told = answer(["config", "default", "--mixed-precision", "bf16"])
    assert (status, file.read_text()) == (2, before)
    assert "Give --overwrite" in told
    assert answer(["config", "default", "--mixed-precision", "bf16"], "y")[0] == 0
    assert config_of(file).mixed_precision == "bf16"
    assert answer(["config", "--default", "--overwrite"])[0] == 0
    assert file.read_text() == before
    assert "nothing was changed" in answer(["config", "default"])[1]


def test_the_file_names_a_schema_that_knows_it(file, capsys):
    assert main(["config", "default"]) == 0
    first_line = file.read_text().splitlines()[0]
    schema_file = Path(first_line.partition("$schema=file://")[2])
    schema = json.loads(schema_file.read_text())
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    capsys.readouterr()
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema


def test_accelerates_file_is_taken_over_with_a_table_also_from_its_place(
    file, answer, tmp_path, monkeypatch
):
    source = tmp_path / "theirs.yaml"
    shutil.copy(FILES / "v0_20_sharded.yaml", source)
    before = source.read_text()
    status, told = answer(["config", "import", str(source)])
    assert status == 0, told
    assert "what was mapped" in told
    assert "fsdp: sharding_strategy=SHARD_GRAD_OP" in told
    assert "fully_shard does it by itself" in told
    assert source.read_text() == before, "it is Accelerate's"
    assert config_of(file) == config_of(source)
    file.unlink()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert answer(["config", "import"])[0] == 2
    folder = tmp_path / "accelerate"
    folder.mkdir()
    shutil.copy(FILES / "v0_11_one_process.yaml", folder / "default_config.yaml")
    assert answer(["config", "import"])[0] == 0
    assert config_of(file) == RunConfig(num_processes=1, device="cpu")


def test_an_update_of_accelerates_file_asks_first(answer, tmp_path):
    source = tmp_path / "theirs.yaml"
    shutil.copy(FILES / "v0_5_half_precision.yaml", source)
    wanted = config_of(source)
    assert answer(["config", "update", "--config_file", str(source)], "n")[0] == 1
    status, told = answer(["config", "update", "--config_file", str(source), "--overwrite"])
    assert status == 0, told
    loaded = load_config_file(source)
    assert (loaded.is_accelerate, loaded.config) == (False, wanted)


def test_a_file_is_shown_as_it_is_read(file, answer):
    status, told = answer(["config", "show"])
    assert status == 2
    assert "There is no configuration file" in told
    assert main(["config", "default"]) == 0
    status, told = answer(["config", "show"])
    assert status == 0
    assert "device: cpu" in told or "device: cuda" in told
