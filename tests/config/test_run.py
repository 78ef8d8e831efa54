from __future__ import annotations

import copy
import enum
import inspect
import json
import pickle
from datetime import timedelta

import numpy as np
import pytest
from pydantic import ValidationError

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.field_rules import rule_of
from nbaccel.errors import ConfigError
from tests.needs import DEEPSPEED_ROW

EVERYTHING = {
    "num_processes": 4,
    "device": "cuda",
    "tpu_driver": "torch_xla",
    "mixed_precision": "bf16",
    "start_method": "template",
    "engine": "elastic",
    "use_port": 29511,
    "master_addr": "10.0.0.7",
    "node_rank": 1,
    "num_nodes": 2,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "10.0.0.7:29400",
    "rdzv_conf": {"timeout": 60, "nested": {"a": [1, None]}},
    "rdzv_id": "job 7: ü",
    "max_restarts": 3,
    "monitor_interval": 0.5,
    "log_dir": "logs",
    "shown_output": "0:3",
    "log_line_prefix_template": "[${rank}] ",
    "timeout": 3600.0,
    "share_back": False,
    "on_stop": "discard",
    "resume": "kept",
    "compare": 30,
    "threads_per_process": 2,
    "strategy": "fsdp",
    "fsdp": {"cpu_offload": True, "transformer_cls_names_to_wrap": ["Block"]},
    "dynamo": {"backend": "inductor", "dynamic": True},
    "variables": {"NCCL_DEBUG": "INFO"},
    "zero_stage": 2,
    "deepspeed": {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 1.0},
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": True,
    "fp8": {"backend": "te", "margin": 1, "override_linear_precision": (True, False, False)},
}


def mistakes_of(**settings):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings)
    return caught.value.mistakes


@DEEPSPEED_ROW
def test_the_sample_says_everything():
    # A hostfile contradicts num_nodes: one notebook starts the workers of all its hosts.
    assert set(EVERYTHING) == set(RunConfig.model_fields) - {"hostfile", "include", "exclude"}
    config = RunConfig(**EVERYTHING)
    assert all(getattr(config, name) != RunConfig.model_fields[name].default for name in EVERYTHING)


@pytest.mark.parametrize(
    "settings", [{}, {"num_processes": 2}, pytest.param(EVERYTHING, marks=DEEPSPEED_ROW)]
)
def test_round_trips(settings):
    config = RunConfig(**settings)

    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.from_yaml(config.model_dump_json()) == config
    assert RunConfig.from_yaml(config.to_yaml()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert eval(repr(config), {"RunConfig": RunConfig, "Fp8Config": Fp8Config}) == config
    assert hash(config.changed()) == hash(config)


def test_json_is_complete_yaml_is_what_was_said_and_runs_no_code():
    config = RunConfig(mixed_precision="bf16", num_processes=2)

    assert set(json.loads(config.model_dump_json())) == set(RunConfig.model_fields)
    assert config.to_yaml() == "num_processes: 2\nmixed_precision: bf16\n"
    assert repr(config) == str(config) == "RunConfig(num_processes=2, mixed_precision='bf16')"
    assert repr(RunConfig()) == "RunConfig()"
    assert RunConfig.from_yaml("") == RunConfig.from_yaml("{}") == RunConfig()
    assert RunConfig.from_yaml("mixed_precision: no").mixed_precision == "no"
    with pytest.raises(ConfigError, match="cannot be read from YAML"):
        RunConfig.from_yaml("rdzv_conf: !!python/object/apply:os.getcwd []")


class Precision(str, enum.Enum):
    BF16 = "bf16"


BECOMES = {
    "num_processes": [(np.int64(2), 2), ("2", 2), (2.0, 2)],
    "use_port": [("29500", 29500), (0, None), ("0", None), ("", None), (None, None)],
    "mixed_precision": [(None, "no"), ("BF16", "bf16"), (Precision.BF16, "bf16")],
    "timeout": [(np.float32(1.5), 1.5), (2, 2.0), (timedelta(minutes=1), 60.0)],
    "share_back": [(np.bool_(False), False)],
    "device": [(" CPU ", "cpu")],
    "zero_stage": [("2", 2), (np.int64(3), 3), (1.0, 1), (0, 0), (None, None)],
}


@pytest.mark.parametrize("name", BECOMES)
def test_what_people_pass_becomes_plain(name):
    for given, kept in BECOMES[name]:
        value = getattr(RunConfig(**{name: given}), name)
        assert (value, type(value)) == (kept, type(kept)), given


WRONG = {
    "num_processes": [0, -1, True, 2.5, "two", np.bool_(True)],
    "device": ["gpuu", None, 3],
    "tpu_driver": ["jax"],
    "mixed_precision": ["bf61", True],
    "start_method": ["spwan"],
    "use_port": [65536, -1, False, "http"],
    "master_addr": [""],
    "node_rank": [-1],
    "num_nodes": [0],
    "rdzv_backend": [""],
    "rdzv_endpoint": [None],
    "rdzv_conf": [{"a": object()}, [1]],
    "rdzv_id": [""],
    "max_restarts": [-1],
    "monitor_interval": [0],
    "log_line_prefix_template": [3],
    "timeout": [0, float("inf"), float("nan"), True],
    "share_back": [None, "perhaps"],
    "threads_per_process": [0],
    "zero_stage": [4, -1, True, 1.5, "two"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_remedy(name):
    hint = rule_of(RunConfig.model_fields[name])
    for value in WRONG[name]:
        (message,) = mistakes_of(**{name: value})
        assert message.startswith(f"{name} must be ")
        assert "got " in message
        assert hint.why in message
        assert hint.do in message or "Did you mean" in message


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"num_proceses": 2}, "num_processes"),
        ({"precision": "bf16"}, "mixed_precision"),
        ({"mixed_precision": "bf61"}, "bf16"),
        ({"mixed_precision": "fp32"}, "no"),
        ({"mixed_precision": "bfloat16"}, "bf16"),
        ({"device": "gpu"}, "cuda"),
        ({"device": "cdua"}, "cuda"),
        ({"tpu_driver": "xla"}, "torch_xla"),
        ({"tpu_driver": "TorchTPU"}, "torch_tpu"),
        ({"start_method": "spawn"}, "template"),
        ({"start_method": "frok"}, "fork"),
    ],
)
def test_did_you_mean(settings, meant):
    (message,) = mistakes_of(**settings)
    assert message.endswith(f"Did you mean {meant!r}?")


def test_all_mistakes_come_at_once_and_none_follows_from_another():
    with pytest.raises(ConfigError) as caught:
        RunConfig(num_processes=0, zzz=1, mixed_precision="x", num_nodes=2, node_rank=2)

    text = str(caught.value)
    assert text.startswith("5 settings are wrong:")
    for part in ("num_processes", "zzz", "mixed_precision", "node_rank=2", "master_addr"):
        assert part in text
    assert isinstance(caught.value.__cause__, ValidationError)
    (message,) = mistakes_of(num_nodes=-1, node_rank=5)
    assert message.startswith("num_nodes must be")
    (message,) = mistakes_of(timeout="x" * 100_000)
    assert len(message) < 400


def test_a_mapping_is_needed():
    for text in ("[1]", "3", '"x"'):
        with pytest.raises(ConfigError, match="Settings need names"):
            RunConfig.from_yaml(text)
    with pytest.raises(ConfigError, match="cannot be read from YAML"):
        RunConfig.from_yaml("{")
    with pytest.raises(ConfigError, match=r"^1 is no setting"):
        RunConfig.from_yaml("1: 2")


def test_it_is_frozen_keyword_only_and_validated_when_changed():
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.num_processes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        RunConfig(2)  # type: ignore[misc]
    config = RunConfig(num_processes=2)

    assert config.changed(mixed_precision="bf16") == RunConfig(
        num_processes=2, mixed_precision="bf16"
    )
    assert config.num_processes == 2
    with pytest.raises(ConfigError, match="inline"):
        config.changed(start_method="inline")
    with pytest.raises(ConfigError, match="num_processes"):
        config.changed(num_proceses=3)


def test_schema_rules_and_signature_describe_every_setting():
    schema = RunConfig.model_json_schema()

    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for name, entry in schema["properties"].items():
        assert entry["description"].endswith("."), name
    for name in ("timeout", "monitor_interval"):
        assert "Seconds" in schema["properties"][name]["description"]
    assert schema["properties"]["mixed_precision"]["enum"] == ["no", "fp16", "bf16", "fp8"]
    assert schema["additionalProperties"] is False
    for name in RunConfig.model_fields:
        hint = rule_of(RunConfig.model_fields[name])
        assert hint.must
        assert RunConfig.model_fields[name].description
        for text in filter(None, (hint.why, hint.do)):
            assert text[0].isupper() or text[0] == '"'
            assert not text.endswith(".")
    signature = str(inspect.signature(RunConfig))
    assert "num_processes: int | None = None" in signature
    assert "Annotated" not in signature
    assert "FieldRule" not in signature


TWO_NODES = {"num_nodes": 2, "num_processes": 2, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"node_rank": 1}, ["node_rank=1", "num_nodes=1", "Number the nodes from 0"]),
        ({**TWO_NODES, "num_processes": None}, ["num_processes", "num_nodes=2"]),
        ({**TWO_NODES, "master_addr": "127.0.0.1"}, ["master_addr", "'127.0.0.1'", "first node"]),
        ({**TWO_NODES, "master_addr": "localhost"}, ["'localhost'"]),
        ({**TWO_NODES, "master_addr": "::1"}, ["'::1'"]),
        ({**TWO_NODES, "rdzv_endpoint": "localhost:29400"}, ["rdzv_endpoint", "'localhost'"]),
        ({**TWO_NODES, "rdzv_endpoint": "[::1]:29400"}, ["rdzv_endpoint", "'::1'"]),
        ({"rdzv_endpoint": "10.0.0.1"}, ["host:port", "'10.0.0.1'"]),
        ({"rdzv_endpoint": "10.0.0.1:99999"}, ["host:port", "99999"]),
        ({"rdzv_backend": "etcd"}, ["rdzv_endpoint", "'etcd'"]),
        ({"start_method": "inline", "num_processes": 2}, ["inline", "num_processes=2"]),
        ({"start_method": "inline", "max_restarts": 1}, ["inline", "max_restarts=1", "auto"]),
        (
            {**TWO_NODES, "num_processes": 1, "start_method": "inline"},
            ["inline", "num_nodes=2", "leave them out"],
        ),
    ],
)
def test_a_contradiction_names_both_sides(settings, parts):
    (message,) = mistakes_of(**settings)
    for part in parts:
        assert part in message
