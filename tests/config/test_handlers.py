from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbaccel import (
    AutocastKwargs,
    ConfigError,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from nbaccel.utils import TorchDynamoPlugin


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: GradientAccumulationPlugin(num_steps=0),
            r"num_steps=0\) must be a whole number of at least 1",
        ),
        (lambda: ProjectConfiguration(total_limit=0), r"total_limit=0\) must be .* at least 1"),
        (lambda: ProjectConfiguration(iteration=-1), r"iteration=-1\) must be .* at least 0"),
        (lambda: InitProcessGroupKwargs(timeout=0), r"timeout=0\) must be .* seconds above 0"),
        (lambda: DistributedDataParallelKwargs(comm_hook="zip"), r"comm_hook='zip'.*power_sgd"),
        (lambda: FullyShardedDataParallelPlugin(fsdp_version=3), r"fsdp_version=3\).*fully_shard"),
        (
            lambda: FullyShardedDataParallelPlugin(auto_wrap_policy="all"),
            r"auto_wrap_policy='all'.*size_based_wrap",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT"),
            r"LOCAL_STATE_DICT.*FULL_STATE_DICT",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(min_num_params=0),
            r"min_num_params=0\) must.*at least 1",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"),
            r"sharding_strategy='NO_SHARD'.*leave the plugin out",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(param_init_fn=print),
            r"param_init_fn=.*is FSDP1's.*before prepare",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(activation_checkpointing_offload=True),
            r"activation_checkpointing_offload=True\).*Leave it out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value_and_a_remedy(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_fsdp1s_sharding_strategies_are_understood_and_all_mistakes_told():
    for given, reshards in (("FULL_SHARD", True), ("ShardingStrategy.SHARD_GRAD_OP", False)):
        plugin = FullyShardedDataParallelPlugin(
            sharding_strategy=given, use_orig_params=True, sync_module_states=True
        )
        assert plugin.reshard_after_forward is reshards
    with pytest.raises(ConfigError) as caught:
        FullyShardedDataParallelPlugin(fsdp_version=3, state_dict_type="?", min_num_params=0)
    assert len(caught.value.mistakes) == 3


def test_what_differs_from_the_defaults_is_passed_on_and_logs_go_to_the_projects_folder():
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    hooks = DistributedDataParallelKwargs(comm_hook="bf16")
    assert hooks.to_kwargs() == {"comm_hook": DDPCommunicationHookType.BF16}
    assert hooks.to_dict()["bucket_cap_mb"] == 25
    assert ProjectConfiguration(project_dir="here").logging_dir == "here"
    assert ProjectConfiguration("here", logging_dir="there").logging_dir == "there"
    moved = ProjectConfiguration()
    moved.set_directories(Path("new"))
    assert (moved.project_dir, moved.logging_dir) == (Path("new"), Path("new"))


def test_what_fsdp1_has_and_changes_no_number_is_taken_with_one_warning():
    with pytest.warns(UserWarning, match="fully_shard, which is FSDP2") as told:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, use_orig_params=False, backward_prefetch="BACKWARD_PRE"
        )
    assert len(told) == 1
    assert re.search(
        r"fsdp_version=1, backward_prefetch='BACKWARD_PRE'.*use_orig_params=False.*fully_shard",
        str(told[0].message),
    )
    assert told[0].filename == __file__
    assert (plugin.fsdp_version, plugin.state_dict_type) == (2, "FULL_STATE_DICT")


def test_accelerates_positions_defaults_and_one_file_in_the_end():
    plugin = FullyShardedDataParallelPlugin(2, None, False, None, None, "no_wrap", True)
    assert plugin.reshard_after_forward is False
    assert plugin.cpu_offload is True
    assert FullyShardedDataParallelPlugin().reshard_after_forward is True
    assert FullyShardedDataParallelPlugin().state_dict_type == "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert not plugin.writes_shards
    with pytest.raises(ConfigError, match="'LOCAL'"):
        plugin.set_state_dict_type("LOCAL")


def test_torchs_own_objects_are_understood():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    whole = FullyShardedDataParallelPlugin(
        state_dict_config=fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=fsdp.FullOptimStateDictConfig(),
        cpu_offload=fsdp.CPUOffload(offload_params=True),
    )
    assert (whole.state_dict_type, whole.cpu_offload) == ("FULL_STATE_DICT", True)
    assert not FullyShardedDataParallelPlugin(cpu_offload=fsdp.OffloadPolicy()).cpu_offload
    given = fsdp.StateDictType.SHARDED_STATE_DICT
    assert FullyShardedDataParallelPlugin(state_dict_type=given).writes_shards
    with pytest.raises(ConfigError, match="contradicts state_dict_config"):
        FullyShardedDataParallelPlugin(
            state_dict_type=given, state_dict_config=fsdp.FullStateDictConfig()
        )


def test_a_dynamo_plugin_becomes_arguments_of_torch_compile(monkeypatch):
    plugin = TorchDynamoPlugin(backend="EAGER", fullgraph=True, use_regional_compilation=True)
    assert plugin.to_kwargs() == {"backend": "eager", "fullgraph": True}
    assert not TorchDynamoPlugin().compiles
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "inductor", "mode": "reduce-overhead"}
    assert TorchDynamoPlugin(backend="Own").to_kwargs()["backend"] == "Own"
    with pytest.raises(ConfigError, match=r"mode='fast'.*max-autotune"):
        TorchDynamoPlugin(backend="eager", mode="fast")
