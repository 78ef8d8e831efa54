from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError

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
            ["inline", "num_nodes=2", "leave out num_nodes"],
        ),
    ],
)
def test_a_contradiction_names_both_sides(settings, parts):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings)
    (message,) = caught.value.mistakes
    for part in parts:
        assert part in message


def test_nothing_is_said_of_settings_already_wrong():
    with pytest.raises(ConfigError) as caught:
        RunConfig(num_nodes=-1, node_rank=5)
    (message,) = caught.value.mistakes
    assert message.startswith("num_nodes must be")
