from __future__ import annotations

import dataclasses

import pytest

from nbaccel.config import RunConfig
from nbaccel.plan import Choice, Inventory, resolve
from nbaccel.plan.topology import Topology

MACHINE = Inventory(cpu_cores=8, host_total_bytes=2**35, host_available_bytes=2**34)


def plan_of(**settings):
    return resolve(RunConfig(device="cpu", **settings), MACHINE)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "1 CPU worker, 8 threads, in this process"),
        ({"num_processes": 2}, "2 CPU workers, 4 threads each, started from the template"),
        ({"num_processes": 8}, "8 CPU workers, 1 thread each, started from the template"),
        (
            {"num_processes": 2, "start_method": "fork", "mixed_precision": "bf16"},
            "2 CPU workers, 4 threads each, bf16, forked from this process",
        ),
        (
            {"num_processes": 1, "num_nodes": 3, "node_rank": 2, "master_addr": "10.0.0.1"},
            "1 CPU worker, 8 threads, started from the template, node 2 of 3",
        ),
    ],
)
def test_the_headline(settings, line):
    plan = plan_of(**settings)
    assert plan.headline() == line
    assert plan.explain().splitlines()[0] == line
    assert str(plan) == plan.explain()


def test_the_table_is_aligned_complete_and_long_reasons_go_on_under_themselves():
    plan = plan_of(num_processes=16, mixed_precision="fp16")
    lines = plan.explain().splitlines()

    head = lines[2]
    column = head.index("why")
    body = lines[3 : 3 + len(plan.choices)]
    for line, choice in zip(body, plan.choices, strict=True):
        assert line.startswith(choice.name)
        assert line[head.index("value") :].startswith(str(choice.value))
        assert line[column:].startswith(choice.reason[:20])
    assert "Warnings:" in lines
    assert len(plan.warnings) == 2
    assert all(len(line) <= 100 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    plan = plan_of(num_processes=2)
    long = dataclasses.replace(plan, choices=(Choice("device", "cpu", "because " * 30),))
    lines = long.explain().splitlines()[2:]
    column = lines[0].index("why")
    assert len(lines) > 3
    assert all(line[:column].strip() == "" for line in lines[2:])
    assert "Warnings" not in plan_of(num_processes=2).explain()


def test_another_start_method_replaces_the_choice():
    plan = plan_of(num_processes=2)
    other = plan.with_start_method("fork", "a lock in args cannot be pickled")

    assert other.start_method == "fork"
    assert "a lock in args cannot be pickled" in other.explain()
    assert "forked from this process" in other.headline()
    assert [choice.name for choice in other.choices] == [choice.name for choice in plan.choices]
    assert plan.start_method == "template"


def of_nodes(workers_per_node: list[int]) -> tuple[Topology, ...]:
    return Topology.of_hosts(workers_per_node, master_addr="127.0.0.1", master_port=1234)


def test_ranks_follow_the_nodes():
    workers = of_nodes([2, 2, 2])[2:4]

    assert [(w.rank, w.local_rank) for w in workers] == [(2, 0), (3, 1)]
    assert {(w.world_size, w.local_world_size, w.node_rank) for w in workers} == {(6, 2, 1)}


def test_variables_of_a_worker_respect_the_users_interface_and_other_nodes():
    worker = of_nodes([2])[1]

    assert worker.variables(mixed_precision="bf16", device="cpu", environ={}) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "NBACCEL_DEVICE": "cpu",
        "FORK_LAUNCHED": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    one = Topology(master_port=1).variables(environ={"GLOO_SOCKET_IFNAME": "eth0"})
    assert "GLOO_SOCKET_IFNAME" not in one
    assert one["NCCL_SOCKET_IFNAME"] == "lo"

    two = of_nodes([1, 1])[0].variables(environ={})
    assert not [name for name in two if name.endswith("IFNAME")]
    assert "ACCELERATE_USE_CPU" not in Topology(master_port=1).variables(device="cuda", environ={})
