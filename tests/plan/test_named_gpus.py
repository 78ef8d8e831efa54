"""``gpu_ids``: the plan counts the GPUs that workers will see, and no others."""

from __future__ import annotations

import dataclasses

import pytest

from nbaccel.abc.engine import Host
from nbaccel.config import RunConfig, read_accelerate_yaml
from nbaccel.errors import ConfigError
from nbaccel.hosts.host_session import _named_devices
from nbaccel.plan import Inventory, resolve
from nbaccel.plan.resolving import with_named_gpus
from tests.plan.test_resolving import CPU, with_gpus


def named(setting: str, **settings: object) -> RunConfig:
    return RunConfig(variables={"CUDA_VISIBLE_DEVICES": setting}, **settings)


def uuids(machine: Inventory) -> list[str]:
    assert [gpu.index for gpu in machine.gpus] == list(range(len(machine.gpus)))
    return [gpu.uuid for gpu in machine.gpus]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("0,2", ["GPU-0", "GPU-2"]),
        ("3, 1", ["GPU-3", "GPU-1"]),
        ("GPU-2", ["GPU-2"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_plan_has_the_named_gpus_alone(setting: str, left: list[str]) -> None:
    plan = resolve(named(setting), with_gpus(4))
    assert uuids(plan.inventory) == left
    assert (plan.device, plan.num_processes) == (("cuda", len(left)) if left else ("cpu", 1))
    # Looked at again, as a launch on hosts does, it is the same.
    assert resolve(named(setting), plan.inventory).inventory == plan.inventory


def test_workers_beyond_the_named_gpus_share_them() -> None:
    plan = resolve(named("1", num_processes=2), with_gpus(2))
    assert plan.process_group_backend == "gloo"
    assert any("2 workers share 1 GPU" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("0,7", ["CUDA_VISIBLE_DEVICES='0,7'", "GPU '7'", "here are 2 GPUs (0, 1)", "Name others"]),
        ("1,1", ["GPU '1', twice"]),
        ("GPU-9", ["GPU 'GPU-9'"]),
        ("x", ["GPU 'x'"]),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(setting: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(named(setting), with_gpus(2))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert resolve(named(setting, device="cpu"), with_gpus(2)).device == "cpu"


def test_a_machine_without_gpus_has_none_to_leave_out() -> None:
    assert resolve(named("0,1"), CPU).device == "cpu"


def test_numbers_are_the_machine_s_where_this_process_sees_a_part() -> None:
    part = dataclasses.replace(with_gpus(2), gpu_setting="4,6")
    assert uuids(with_named_gpus(part, "6")[0]) == ["GPU-1"]
    assert "here are 2 GPUs (4, 6)" in with_named_gpus(part, "0")[1]


def test_a_file_of_accelerate_counts_its_gpus() -> None:
    text = "distributed_type: MULTI_GPU\ngpu_ids: 1,3\nmachine_rank: 0\n"
    plan = resolve(read_accelerate_yaml(text).config, with_gpus(4))
    assert (plan.num_processes, uuids(plan.inventory)) == (2, ["GPU-1", "GPU-3"])


def test_named_slots_are_the_gpus_of_their_host() -> None:
    hosts = [
        Host(name="one", address="one", slots=2, devices=(0, 2)),
        Host(name="two", address="two", slots=2),
    ]
    machines = {"one": with_gpus(4), "two": with_gpus(2)}
    seen = _named_devices(hosts, machines, RunConfig())
    assert [uuids(seen[name]) for name in seen] == [["GPU-0", "GPU-2"], ["GPU-0", "GPU-1"]]
    with pytest.raises(ConfigError, match=r"host one: .*GPU '2', and here are 1 GPU"):
        _named_devices(hosts, {**machines, "one": with_gpus(1)}, RunConfig())
