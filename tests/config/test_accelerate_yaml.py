from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from nbaccel.config import Fp8Config, RunConfig, load_config_file
from nbaccel.config.config_files import is_accelerate_file
from nbaccel.errors import ConfigError
from tests.needs import DEEPSPEED_ROW

FILES = Path(__file__).parent / "accelerate_yaml"

EXPECTED = {
    "v0_5_half_precision": {
        "num_processes": 4,
        "device": "cuda",
        "mixed_precision": "fp16",
        "use_port": 29501,
    },
    "v0_11_one_process": {"num_processes": 1, "device": "cpu"},
    "v0_20_sharded": {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "strategy": "fsdp",
        "fsdp": {
            "auto_wrap_policy": "transformer_based_wrap",
            "cpu_offload": False,
            "sharding_strategy": "SHARD_GRAD_OP",
            "transformer_cls_names_to_wrap": ["GPT2Block", "GPT2MLP"],
            "state_dict_type": "FULL_STATE_DICT",
        },
        "dynamo": {"backend": "inductor"},
    },
    "v0_34_eight_bits": {
        "num_processes": 2,
        "device": "cuda",
        "mixed_precision": "fp8",
        "fp8": Fp8Config(
            backend="te",
            amax_history_len=16,
            fp8_format="E4M3",
            interval=2,
            override_linear_precision=(False, False, True),
        ),
        "variables": {"CUDA_VISIBLE_DEVICES": "0,2"},
    },
    "v1_15_sharded": {
        "num_processes": 4,
        "strategy": "fsdp",
        "fsdp": {
            "activation_checkpointing": True,
            "auto_wrap_policy": "size_based_wrap",
            "cpu_ram_efficient_loading": True,
            "min_num_params": 1000000,
            "cpu_offload": True,
            "reshard_after_forward": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
        "dynamo": {
            "backend": "inductor",
            "mode": "max-autotune",
            "dynamic": True,
            "fullgraph": False,
            "use_regional_compilation": True,
        },
        "variables": {"XLA_FLAGS": "--dump"},
    },
    "v0_28_zero": {
        "num_processes": 4,
        "num_nodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.7",
        "use_port": 29400,
        "mixed_precision": "fp16",
        "strategy": "deepspeed",
        "zero_stage": 3,
        "gradient_accumulation_steps": 4,
        "deepspeed": {
            "gradient_clipping": 0.5,
            "zero_optimization": {
                "offload_optimizer": {"device": "cpu"},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        "variables": {"ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
    },
    "v1_15_zero_file": {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "strategy": "deepspeed",
        "zero_stage": 2,
        "deepspeed": {"train_micro_batch_size_per_gpu": "auto"},
        "variables": {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
    },
}
"""What each file says, in our settings."""


def read(text: str):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_config_file(file.name)


def outcomes(file):
    return {mapped.key: (mapped.is_used, mapped.outcome) for mapped in file.mapped_keys}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=DEEPSPEED_ROW if "zero" in name else ())
        for name in sorted(EXPECTED)
    ],
)
def test_files_of_several_versions_become_our_settings(name):
    loaded = load_config_file(FILES / f"{name}.yaml")
    assert loaded.is_accelerate
    assert loaded.config == RunConfig(**EXPECTED[name])


@pytest.mark.parametrize("name", [name for name in sorted(EXPECTED) if "zero" not in name])
def test_every_key_of_a_file_has_its_line(name):
    """Nothing is dropped without a word: keys of sections stand with their section's name."""
    from nbaccel.config.text_forms import read_yaml

    path = FILES / f"{name}.yaml"
    named = {
        f"{key}.{inner}" if isinstance(value, dict) and value else key
        for key, value in read_yaml(path.read_text()).items()
        for inner in (value if isinstance(value, dict) and value else [""])
    }
    told = {mapped.key.replace(".fsdp_", ".") for mapped in load_config_file(path).mapped_keys}
    assert {key.replace(".fsdp_", ".") for key in named} == told


@DEEPSPEED_ROW
def test_deepspeeds_file_decides_where_there_is_one():
    told = outcomes(load_config_file(FILES / "v1_15_zero_file.yaml"))
    assert told["deepspeed_config.gradient_clipping"] == (False, "DeepSpeed's file decides")
    assert told["mixed_precision"] == (False, "DeepSpeed's file decides")


def test_processes_are_counted_on_each_machine_and_mistakes_name_the_files_keys():
    text = "distributed_type: MULTI_CPU\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n"
    assert read(f"{text}num_processes: 6\n").config.num_processes == 3
    with pytest.raises(ConfigError, match=r"num_processes=7 cannot be divided by num_machines=2"):
        read(f"{text}num_processes: 7\n")
    text = "distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 4\nmachine_rank: 0\n"
    with pytest.raises(ConfigError, match=r"master_addr cannot be '127.0.0.1'.*main_process_ip"):
        read(f"{text}main_process_ip: 127.0.0.1\n")


def test_all_mistakes_of_a_file_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        read(
            "distributed_type: MEGATRON_LM\nmixed_precison: fp16\nmachine_rank: -1\n"
            "fsdp_config:\n  fsdp_offload: true\nwhatever: 1\n"
        )
    text = str(caught.value)
    assert "distributed_type='MEGATRON_LM' is not supported" in text
    assert "Did you mean 'mixed_precision'?" in text
    assert "node_rank must be" in text
    assert "machine_rank" in text
    assert "whatever=1 is no key" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", "Amazon SageMaker"),
        ("distributed_type: MULTI_NPU\n", "MULTI_NPU.* is not supported"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_state_dict_typ: A\n",
            "Did you mean 'fsdp_state_dict_type'",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
            "sharding_strategy='HYBRID_SHARD'.* is not supported",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing_offload: true\n",
            "does not move them to host memory",
        ),
        (
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 2\n",
            "parallelism_config_tp_size=2 mixes parallelisms",
        ),
        ("distributed_type: NO\nuse_cpu: maybe\n", "use_cpu='maybe' must be true or false"),
        ("distributed_type: NO\nfsdp_config: 3\n", "fsdp_config=3 must be a section"),
        ("distributed_type: NO\nmixed_precision: fp16x\n", "Did you mean 'fp16'"),
        ("distributed_type: NO\nmixed_precision: fp8\nfp8_config:\n  opt: 1\n", "fp8_config.opt=1"),
        ("- 1\n", "Settings need names"),
        ("a: [\n", "cannot be read from YAML"),
    ],
)  # fmt: skip
def test_what_would_train_otherwise_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        read(text)


def test_what_has_no_effect_is_told_with_its_reason():
    told = outcomes(
        read(
            "distributed_type: MULTI_CPU\nnum_processes: -1\ntpu_name: a\nmpirun_config:\n"
            "  mpirun_hostfile: b\nfsdp_config:\n  fsdp_version: 2\ndowncast_bf16: 'yes'\n"
            "main_training_function: main\nipex_config:\n  ipex: true\n"
        )
    )
    assert told.pop("distributed_type") == (True, "device=cpu")
    assert told["num_processes"] == (False, "the plan chooses")
    assert told["fsdp_config.fsdp_version"] == (False, "distributed_type does not use it")
    assert not any(is_used for is_used, _ in told.values())
    assert all(len(reason) > 5 for _, reason in told.values())


@DEEPSPEED_ROW
@pytest.mark.skipif(
    "hostfile" not in RunConfig.model_fields,
    reason="this version has no engines for several machines",
)
@pytest.mark.parametrize("launcher", ["pdsh", "standard"])
def test_a_file_of_hosts_counts_the_workers_of_all(launcher):
    config = read(
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\nmachine_rank: 0\n"
        "main_process_ip: 10.0.0.1\ndeepspeed_config:\n  zero_stage: 2\n"
        f"  deepspeed_hostfile: hosts.txt\n  deepspeed_multinode_launcher: {launcher}\n"
    ).config
    found = (config.hostfile, config.num_nodes, config.num_processes)
    assert found == (("hosts.txt", 1, 8) if launcher == "pdsh" else (None, 2, 4))


@DEEPSPEED_ROW
def test_filters_of_hosts_are_settings_with_a_hostfile():
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n"
        "  deepspeed_inclusion_filter: worker-1:0,1@worker-2\n"
    )
    hosts = "  deepspeed_hostfile: hosts.txt\n  deepspeed_multinode_launcher: pdsh\n"
    assert read(text + hosts).config.include == "worker-1:0,1@worker-2"
    assert read(text).config.include is None


def test_ours_and_theirs_are_told_apart_and_no_sharding_is_data_parallel(tmp_path):
    assert is_accelerate_file({"machine_rank": 0})
    assert not is_accelerate_file({"mixed_precision": "bf16", "num_processes": 2})
    ours = tmp_path / "ours.yaml"
    ours.write_text("num_processes: 2\n")
    assert load_config_file(ours).mapped_keys == ()
    ours.write_text("num_proceses: 2\n")
    with pytest.raises(ConfigError, match=r"ours\.yaml: .*Did you mean 'num_processes'"):
        load_config_file(ours)
    file = read("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n")
    assert (file.config.strategy, file.config.fsdp) == ("auto", None)


def test_a_default_file_is_where_the_environment_says_if_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("NBACCEL_CONFIG", str(tmp_path / "none.yaml"))
    assert load_config_file().config == RunConfig()
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_config_file(tmp_path / "none.yaml")
    from nbaccel.config import default_config_path

    monkeypatch.delenv("NBACCEL_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_config_path() == tmp_path / "nbaccel/default_config.yaml"
    monkeypatch.setenv("NBACCEL_CONFIG", "~/run.yaml")
    assert default_config_path() == Path.home() / "run.yaml"
