"""The options of ``nbaccel launch``: none of another command's is silently swallowed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from nbaccel.cli import main
from nbaccel.cli.launch_options import PEER_OPTIONS
from nbaccel.cli.launch_request import LaunchRequest, SettingsFile, read_launch_request
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.magic_line import setting_options
from tests.needs import HAS_DEEPSPEED_ROW
from tests.programs import run_program

KNOWN_FLAGS = {
    *("--config-file", "--module", "--no-python", "--debug", "--quiet", "--help", "-h", "-m", "-q"),
    *(flag for option in PEER_OPTIONS for flag in option.flags),
    *(flag for option in setting_options() for flag in (*option.flags, option.negative)),
}
# `deepspeed` has it beside --num-gpus in newer versions.
NEWER_FLAGS = {"--num-accelerators"}


def check(flags: list[str], peer: str) -> None:
    there = {f"--{flag[2:].replace('_', '-')}" if flag[:2] == "--" else flag for flag in flags}
    assert there - KNOWN_FLAGS == set(), "it would be swallowed"
    ours = {flag for one in PEER_OPTIONS if one.peer == peer for flag in one.flags}
    # A beginning of a name is one, too.
    gone = {flag for flag in ours if not any(one.startswith(flag) for one in there)}
    assert gone <= NEWER_FLAGS, "the other command does not have it any more"


@pytest.mark.parametrize(
    ("make", "peer"), [(launch_command_parser, "accelerate launch"), (get_args_parser, "torchrun")]
)
def test_every_option_of_a_peer_has_its_row(make, peer):
    check([flag for action in make()._actions for flag in action.option_strings], peer)


@pytest.mark.skipif(not HAS_DEEPSPEED_ROW, reason="DeepSpeed was left out")
@pytest.mark.slow
def test_every_option_of_deepspeed_has_its_row():
    pytest.importorskip("deepspeed", reason="it is not installed")
    code = (
        "import argparse\n"
        "def parse_args(self, *arguments, **keywords):\n"
        "    print('\\n'.join(flag for one in self._actions for flag in one.option_strings))\n"
        "    raise SystemExit\n"
        "argparse.ArgumentParser.parse_args = parse_args\n"
        "from deepspeed.launcher.runner import parse_args\n"
        "parse_args([])\n"
    )
    printed = run_program([sys.executable, "-c", code]).stdout.splitlines()
    flags = [line for line in printed if re.fullmatch(r"--?\w[\w-]*", line)]
    assert len(flags) > 20
    check(flags, "deepspeed")


def test_each_row_says_what_it_does():
    for option in PEER_OPTIONS:
        if option.effect in ("setting", "variable", "fp8-setting"):
            assert option.target, option
        else:
            assert len(option.reason) > 10, option
        if option.effect == "setting" and option.target != "hostfile":
            assert option.target in RunConfig.model_fields, option
        if option.effect == "fp8-setting":
            assert option.target in Fp8Config.model_fields, option


def read(*, file: RunConfig | None = None, **given: object) -> LaunchRequest:
    return read_launch_request(given, SettingsFile(config=file or RunConfig(), name="run.yaml"))


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"num_processes": "4"}, {"num_processes": 4}),
        (
            {"num_processes": "4", "num_machines": "2", "main_process_ip": "h1"},
            {"num_processes": 2},
        ),
        ({"nproc_per_node": "4", "nnodes": "2", "master_addr": "h1"}, {"num_processes": 4}),
        ({"nproc_per_node": "auto"}, {"num_processes": None}),
        ({"nproc_per_node": "gpu"}, {"num_processes": None, "device": "cuda"}),
        ({"nnodes": "1:1", "standalone": True}, {"num_nodes": 1}),
        ({"num_gpus": "-1", "num_nodes": "-1", "node_rank": "-1"}, {"num_processes": None}),
        ({"cpu": True, "num_gpus": "2"}, {"device": "cpu", "num_processes": 2}),
        ({"main_process_port": "0"}, {"use_port": None}),
        ({"master_port": "9901"}, {"use_port": 9901}),
        ({"use_deepspeed": True}, {"strategy": "deepspeed", "zero_stage": 2}),
        ({"use_deepspeed": True, "zero_stage": "3"}, {"zero_stage": 3}),
        ({"use_fsdp": True}, {"strategy": "fsdp"}),
        ({"rdzv_conf": "timeout=60,is_host=true"}, {"rdzv_conf": {"timeout": 60, "is_host": True}}),
        ({"include": "localhost:0,1"}, {"num_processes": 2}),
        ({"enable_each_rank_log": "logs"}, {"log_dir": "logs"}),
        ({"threads_per_process": "2"}, {"threads_per_process": 2}),
        ({"share_back": False}, {"share_back": False}),
        ({"start_method": "spawn"}, {"start_method": "template"}),
    ],
    ids=str,
)
def test_a_spelling_becomes_a_setting(given, settings):
    config = read(**given).config
    assert {name: getattr(config, name) for name in settings} == settings


def test_variables_are_those_that_accelerate_sets():
    request = read(
        use_fsdp=True,
        fsdp_reshard_after_forward="false",
        fsdp_transformer_layer_cls_to_wrap="Block",
        dynamo_backend="eager",
        gpu_ids="0,1",
        env=["A=1", "B=x=y"],
        debug=True,
    )
    assert request.variables == {
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "ACCELERATE_DYNAMO_BACKEND": "eager",
        "A": "1",
        "B": "x=y",
        "ACCELERATE_DEBUG_MODE": "true",
    }
    assert request.notes == ()
    assert request.config.variables == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_what_has_no_effect_is_said_and_one_host_of_a_file_may_be_this_machine(tmp_path):
    request = read(role="trainer", offload_param_device="cpu", fsdp_version="2", tee="3")
    assert [note.split()[0] for note in request.notes] == [
        *("--role", "--tee", "--offload-param-device", "--fsdp-version")
    ]
    assert "without --strategy deepspeed" in request.notes[2]
    request = read(hostfile=str(tmp_path / "hosts"), include="localhost:1")
    assert (request.config.include, request.config.num_processes) == ("localhost:1", None)
    assert request.variables == {}


@pytest.mark.parametrize(
    "flags",
    [
        ["--include", "w1:0,1@w2"],
        ["-i", "w1:0,1@w2"],
        ["--deepspeed_inclusion_filter", "w1:0,1@w2"],
        ["-e", "w1:2"],
    ],
    ids=" ".join,
)
def test_filters_choose_among_the_hosts_of_a_file(flags, tmp_path, capsys):
    (tmp_path / "hosts").write_text("w1 slots=3\nw2 slots=2\n")
    words = ["-H", str(tmp_path / "hosts"), *flags, "--cpu", "--dry-run", "train.py"]
    assert main(["launch", *words]) == 0
    assert "--include w1:0,1@w2:0,1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_megatron_lm": True}, ["--use-megatron-lm", "fsdp_plugin"]),
        ({"cpu": True, "multi_gpu": True}, ["--multi-gpu", "--cpu", "Leave one"]),
        ({"num_processes": "3", "num_machines": "2"}, ["--num-processes=3", "--nproc-per-node"]),
        ({"env": ["PLAIN"]}, ["--env", "'PLAIN'", "NAME=VALUE"]),
        ({"gpu_ids": "0,a"}, ["--gpu-ids", "'0,a'"]),
        ({"gpu_ids": "0", "include": "localhost:1"}, ["--include and --gpu-ids"]),
        ({"include": "w1:0"}, ["include='w1:0' needs hostfile="]),
        ({"exclude": "localhost"}, ["--exclude", "leaves no slot"]),
        ({"include": "localhost:0,0"}, ["--include", "named twice"]),
        ({"hostfile": "h", "include": "a", "exclude": "b"}, ["--include and --exclude"]),
        ({"num_machines": "2", "nnodes": "3"}, ["--nnodes", "--num-machines"]),
        ({"shown_output": "loud"}, ["shown_output", "'loud'"]),
    ],
    ids=str,
)
def test_a_mistake_names_value_and_remedy(given, words):
    with pytest.raises(ConfigError) as raised:
        read(**given)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_flags_are_stronger_than_the_file_and_the_file_than_defaults():
    request = read(mixed_precision="fp8", fp8_backend="ao", fp8_format="E4M3", fp8_margin="1")
    assert request.config.fp8 == Fp8Config(backend="ao", fp8_format="E4M3", margin=1)
    gpus = {"CUDA_VISIBLE_DEVICES": "2", "A": "1"}
    file = RunConfig(num_processes=4, mixed_precision="bf16", variables=gpus)
    request = read(file=file, num_processes="2", gpu_ids="0")
    gpus["CUDA_VISIBLE_DEVICES"] = "0"
    assert request.config == RunConfig(num_processes=2, mixed_precision="bf16", variables=gpus)
    names = ("num_processes", "mixed_precision", "device", "variables")
    sources = ["--num-processes", "run.yaml", "default", "--gpu-ids"]
    assert [request.source_of(name) for name in names] == sources
    with pytest.raises(ConfigError) as raised:
        read(zero_stage="7", vm="host", num_processes="none at all", mixed_precision="fp17")
    assert len(raised.value.mistakes) == 4


def test_a_misspelt_option_is_told(capsys):
    assert main(["launch", "--num_proceses", "2", "train.py"]) == 2
    assert "--num-processes" in capsys.readouterr().err


def test_a_dry_run_shows_sources_and_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("num_processes: 4\nmixed_precision: bf16\n")
    words = ["--config_file", "run.yaml", "--num-processes=2", "--cpu", "--env", "A=1"]
    assert main(["launch", *words, "--dry-run", "train.py"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["num_processes", "2", "--num-processes"] in lines
    assert ["mixed_precision", "bf16", "run.yaml"] in lines
    assert ["device", "cpu", "--cpu"] in lines
    assert ["A", "1", "--env"] in lines
    assert ["process_group_backend", "gloo", "for", "cpu"] in lines


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
    ("flags", "code", "told"),
    [
        ("--main_process_ip 10.0.0.1 --machine_rank 0 --num_machines 2", 0, "10.0.0.1"),
        ("--main_process_ip 10.0.0.1 --machine_rank 1", 0, "10.0.0.1"),
        ("--num_machines 1", 0, "num_nodes=1"),
        ("--master-addr node-1", 0, "node-1"),
        ("--mixed_precision bf16", 2, "master_addr cannot be '127.0.0.1' with num_nodes=2"),
    ],
)
def test_a_file_without_an_address_goes_with_one_by_flag(tmp_path, capsys, text, flags, code, told):
    assert dry_run(tmp_path / "f.yaml", text, *flags.split()) == code
    shown = capsys.readouterr()
    assert told in (" ".join(shown.err.split()) if code else f"{shown.out}{plain(shown.out)}")


def test_processes_that_cannot_be_shared_out_are_replaced_by_a_flag(tmp_path, capsys):
    text = CLUSTER.replace("num_processes: 4", "num_processes: 5") + "main_process_ip: 10.0.0.1\n"
    assert dry_run(tmp_path / "f.yaml", text) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "num_processes=5 cannot be divided by num_machines=2" in told
    assert dry_run(tmp_path / "f.yaml", text, "--num_processes", "8") == 0
    # On each of the file's two machines.
    assert "num_processes=4" in plain(capsys.readouterr().out)
    assert dry_run(tmp_path / "f.yaml", text, "--num_processes", "8", "--num_machines", "4") == 0
    assert "num_processes=2" in plain(capsys.readouterr().out)


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
