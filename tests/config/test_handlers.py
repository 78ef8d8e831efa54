from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: GradientAccumulationPlugin(num_steps=0),
            r"num_steps=0\) is too small.*at least 1",
        ),
        (lambda: ProjectConfiguration(total_limit=0), r"total_limit=0\) is too small"),
        (lambda: ProjectConfiguration(iteration=-1), r"iteration=-1\) is too small"),
        (lambda: InitProcessGroupKwargs(timeout=0), r"timeout=0:00:00\) must be positive"),
        (lambda: DistributedDataParallelKwargs(comm_hook="zip"), r"comm_hook='zip'.*power_sgd"),
        (lambda: FullyShardedDataParallelPlugin(fsdp_version=1), r"fsdp_version=1\).*fully_shard"),
        (
            lambda: FullyShardedDataParallelPlugin(auto_wrap_policy="all"),
            r"auto_wrap_policy='all'.*size_based_wrap",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT"),
            r"LOCAL_STATE_DICT.*FULL_STATE_DICT",
        ),
        (lambda: FullyShardedDataParallelPlugin(min_num_params=0), r"min_num_params=0\) is too"),
        (
            lambda: FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"),
            r"sharding_strategy='NO_SHARD'.*leave the plugin out",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(use_orig_params=False),
            r"use_orig_params=False\) cannot be followed: fully_shard always does it",
        ),
        (
            lambda: FullyShardedDataParallelPlugin(state_dict_config={"offload_to_cpu": False}),
            r"state_dict_config=.*is FSDP1's.*state_dict_type='FULL_STATE_DICT'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value_and_a_remedy(
    make: Callable[[], Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_all_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="?", min_num_params=0)
    assert len(caught.value.mistakes) == 3


@pytest.mark.parametrize(
    ("given", "reshards"),
    [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("ShardingStrategy.FULL_SHARD", True)],
)
def test_fsdp1s_sharding_strategies_are_understood(given: str, reshards: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy=given, use_orig_params=True, sync_module_states=True
    )
    assert plugin.reshard_after_forward is reshards


def test_a_sharding_strategy_may_be_torchs_own() -> None:
    from torch.distributed.fsdp import ShardingStrategy

    plugin = FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert plugin.reshard_after_forward is False


def test_seconds_are_a_timeout_too() -> None:
    assert InitProcessGroupKwargs(timeout=90).timeout == timedelta(seconds=90)


def test_only_what_differs_from_the_defaults_is_passed_on() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    hooks = DistributedDataParallelKwargs(comm_hook="bf16")
    assert hooks.to_kwargs() == {"comm_hook": DDPCommunicationHookType.BF16}
    assert hooks.to_dict()["bucket_cap_mb"] == 25


def test_logs_go_to_the_projects_folder_unless_told_otherwise() -> None:
    assert ProjectConfiguration(project_dir="here").logging_dir == "here"
    assert ProjectConfiguration("here", logging_dir="there").logging_dir == "there"
    moved = ProjectConfiguration()
    moved.set_directories(Path("new"))
    assert (moved.project_dir, moved.logging_dir) == (Path("new"), Path("new"))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("utils", "set_seed gather reduce DistributedType LoggerType tqdm release_memory"),
        ("utils.operations", "gather gather_object broadcast reduce pad_across_processes"),
        ("utils.random", "set_seed synchronize_rng_states"),
        ("utils.memory", "find_executable_batch_size release_memory"),
        ("utils.dataclasses", "FullyShardedDataParallelPlugin ProjectConfiguration LoggerType"),
        ("state", "PartialState AcceleratorState GradientState is_initialized"),
        ("logging", "get_logger MultiProcessAdapter"),
        ("tracking", "GeneralTracker on_main_process"),
        ("data_loader", "DataLoaderShard skip_first_batches"),
        ("optimizer", "AcceleratedOptimizer"),
        ("scheduler", "AcceleratedScheduler"),
        ("accelerator", "Accelerator"),
        ("launchers", "notebook_launcher debug_launcher"),
    ],
)
def test_modules_that_accelerates_users_import_from_have_the_names(module: str, names: str) -> None:
    found = importlib.import_module(f"nbaccel.{module}")
    theirs = importlib.import_module(f"accelerate.{module}")
    for name in names.split():
        assert hasattr(found, name), name
        assert hasattr(theirs, name) or name in {"LoggerType", "on_main_process"}, name


def test_nobodys_state_is_never_there() -> None:
    from nbaccel.state import is_initialized

    assert not is_initialized()
