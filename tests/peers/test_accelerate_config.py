"""Files that the installed Accelerate writes, read by us: workers get what its launcher sets."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from nbaccel.config import Fp8Config, RunConfig, load_config_file
from nbaccel.config.handlers import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from nbaccel.plan.topology import run_variables

config_args = pytest.importorskip("accelerate.commands.config.config_args")
launch = pytest.importorskip("accelerate.commands.launch")
launch_utils = pytest.importorskip("accelerate.utils.launch")

BASE = {"use_cpu": False, "debug": False, "mixed_precision": "no"}
SHARDED_1 = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block,Head",
    # Its questions write it as `fsdp_reshard_after_forward`, which its launcher then ignores.
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_min_num_params": 1000,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}
SHARDED_2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 5000,
    "fsdp_reshard_after_forward": False,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
COMPILED = {
    "dynamo_backend": "EAGER",
    "dynamo_mode": "reduce-overhead",
    "dynamo_use_dynamic": True,
    "dynamo_use_fullgraph": False,
    "dynamo_use_regional_compilation": True,
}


def written(tmp_path: Path, **settings) -> Path:
    """A file of Accelerate's own writer."""
    path = tmp_path / "theirs.yaml"
    cluster = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE", **{**BASE, "num_processes": 2, **settings}
    )
    cluster.to_yaml_file(path)
    return path


def launched_variables(path: Path) -> dict[str, str]:
    """What Accelerate's launcher would set for its processes."""
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(path), "--main_process_port", "29500", "a.py"])
    args, _, _ = launch._validate_launch_command(args)
    return launch_utils.prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    ("settings", "plugin"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": SHARDED_1}, FullyShardedDataParallelPlugin),
        ({"distributed_type": "FSDP", "fsdp_config": SHARDED_2}, FullyShardedDataParallelPlugin),
        ({"distributed_type": "MULTI_GPU", "dynamo_config": COMPILED}, TorchDynamoPlugin),
    ],
    ids=["FSDP 1", "FSDP 2", "compilation"],
)
def test_workers_get_what_accelerates_launcher_sets(settings, plugin, tmp_path, monkeypatch):
    path = written(tmp_path, **copy.deepcopy(settings))
    plugins = []
    for variables in (run_variables(load_config_file(path).config), launched_variables(path)):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            plugins.append(plugin())
    assert plugins[0] == plugins[1]


def test_eight_bits_in_the_words_of_its_questions(tmp_path):
    """Its questionnaire writes other names than its launcher reads; both are understood."""
    section = {
        "backend": "MSAMP",
        "optimization_level": "O1",
        "amax_history_length": 32,
        "override_linear_precision": (True, False, False),
    }
    path = written(
        tmp_path, distributed_type="MULTI_GPU", mixed_precision="fp8", fp8_config=section
    )
    assert load_config_file(path).config.fp8 == Fp8Config(
        backend="msamp",
        opt_level="O1",
        amax_history_len=32,
        override_linear_precision=(True, False, False),
    )


def test_its_basic_file_is_read(tmp_path, monkeypatch):
    """`write_basic_config`, which notebooks of Accelerate's guide call, writes JSON."""
    default = pytest.importorskip("accelerate.commands.config.default")
    path = tmp_path / "default_config.yaml"
    default.write_basic_config(mixed_precision="bf16", save_location=str(path))
    config = load_config_file(path).config
    assert config.mixed_precision == "bf16"
    assert config == RunConfig(
        mixed_precision="bf16", num_processes=config.num_processes, device=config.device
    )
