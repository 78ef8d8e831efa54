from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.config.handlers import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from nbaccel.errors import ConfigError
from nbaccel.plan.topology import run_variables


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_fsdps_settings_arrive_as_they_were_given(monkeypatch):
    settings = {
        "reshard_after_forward": False,
        "cpu_offload": True,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["A", "B"],
        "state_dict_type": "FULL_STATE_DICT",
        "activation_checkpointing": True,
    }
    set_all(monkeypatch, run_variables(RunConfig(strategy="fsdp", fsdp=settings)))
    plugin = FullyShardedDataParallelPlugin()
    assert {name: getattr(plugin, name) for name in settings} == settings


def test_what_accelerates_launcher_sets_is_read(monkeypatch):
    """It sets all variables, with defaults for what was not said; the version tells which count."""
    launched = {
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_MIN_NUM_PARAMS": "0",
        "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_VERSION": "1",
    }
    set_all(monkeypatch, launched)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.reshard_after_forward, plugin.min_num_params) == (False, None)
    assert plugin.auto_wrap_policy == "no_wrap"
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert FullyShardedDataParallelPlugin().reshard_after_forward is True
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "1")
    assert FullyShardedDataParallelPlugin().reshard_after_forward is True


def test_an_argument_wins_over_a_variable_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False, cpu_offload=False)
    assert (plugin.reshard_after_forward, plugin.cpu_offload) == (False, False)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "perhaps")
    with pytest.raises(ConfigError, match=r"FSDP_OFFLOAD_PARAMS.*'perhaps'"):
        FullyShardedDataParallelPlugin()


def test_compilation_arrives_as_it_was_given(monkeypatch):
    config = RunConfig(dynamo={"backend": "eager", "dynamic": True, "fullgraph": True})
    set_all(monkeypatch, run_variables(config))
    plugin = TorchDynamoPlugin()
    assert (str(plugin.backend), plugin.dynamic, plugin.fullgraph) == ("EAGER", True, True)
    assert RunConfig(dynamo="eager").dynamo == {"backend": "eager"}


def test_variables_win_and_cannot_move_a_worker():
    config = RunConfig(
        gradient_accumulation_steps=2,
        variables={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", "NCCL_DEBUG": "INFO"},
    )
    variables = run_variables(config)
    assert variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    assert variables["NCCL_DEBUG"] == "INFO"
    with pytest.raises(ConfigError, match=r"LOCAL_RANK, RANK cannot be given.*node_rank"):
        RunConfig(variables={"RANK": 1, "LOCAL_RANK": 1})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fsdp": {"cpu_ofload": True}, "strategy": "fsdp"}, "Did you mean 'cpu_offload'"),
        ({"fsdp": {"cpu_offload": "x"}, "strategy": "fsdp"}, "cpu_offload='x' must be true"),
        ({"fsdp": {"state_dict_type": "X"}, "strategy": "fsdp"}, "must be one of FULL_STATE_DICT"),
        ({"fsdp": {"cpu_offload": True}}, 'strategy="fsdp", or leave fsdp out'),
        ({"fsdp": 3}, "must be a dictionary"),
        ({"dynamo": {"mode": "fast"}}, "must be one of default"),
        ({"dynamo": {"nothing": 1}}, "The settings are: backend, mode"),
        ({"variables": {"A": None}}, "variables must be"),
    ],
)
def test_mistakes_are_told_with_the_setting(settings, told):
    with pytest.raises(ConfigError, match=told):
        RunConfig(**settings)
