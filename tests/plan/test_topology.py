from __future__ import annotations

from nbaccel.plan.topology import Topology


def of_nodes(
    workers_per_node: list[int], *, master_addr: str = "127.0.0.1", master_port: int = 1234
) -> tuple[Topology, ...]:
    return Topology.of_hosts(workers_per_node, master_addr=master_addr, master_port=master_port)


def test_ranks_follow_the_nodes():
    workers = of_nodes([2, 2, 2])[2:4]

    assert [(w.rank, w.local_rank) for w in workers] == [(2, 0), (3, 1)]
    assert {(w.world_size, w.local_world_size, w.node_rank) for w in workers} == {(6, 2, 1)}
    assert not any(worker.is_main for worker in workers)


def test_variables_of_a_worker_on_one_machine():
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


def test_the_users_interface_and_other_nodes_are_respected():
    one = Topology(master_port=1).variables(environ={"GLOO_SOCKET_IFNAME": "eth0"})
    assert "GLOO_SOCKET_IFNAME" not in one
    assert one["NCCL_SOCKET_IFNAME"] == "lo"

    two = of_nodes([1, 1])[0].variables(environ={})
    assert not [name for name in two if name.endswith("IFNAME")]


def test_a_gpu_run_does_not_force_the_cpu():
    assert "ACCELERATE_USE_CPU" not in Topology(master_port=1).variables(device="cuda", environ={})
