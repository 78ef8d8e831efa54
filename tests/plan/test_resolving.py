from __future__ import annotations

import dataclasses

import pytest

from nbaccel.abc.engine import Host
from nbaccel.config import RunConfig, capabilities
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.hosts.host_session import _named_devices
from nbaccel.plan import Gpu, Inventory, resolve
from nbaccel.plan.resolving import with_named_gpus
from tests import needs
from tests.notebook.machines import V5E_8 as TPU

CPU = Inventory(
    cpu_cores=4,
    host_total_bytes=2**35,
    host_available_bytes=2**34,
    gpu_note="NVML: no driver",
    torch_version="2.13.0+cpu",
)


def with_gpus(num, capability=(9, 0), name="H100", **more):
    gpus = tuple(
        Gpu(
            index=index,
            name=name,
            total_bytes=2**36,
            free_bytes=2**36,
            compute_capability=capability,
            uuid=f"GPU-{index}",
        )
        for index in range(num)
    )
    return dataclasses.replace(CPU, gpus=gpus, gpu_note="", torch_version="2.13.0", **more)


def plan_of(machine=CPU, **settings):
    return resolve(RunConfig(**settings), machine)


def mistakes_of(machine=CPU, **settings):
    with pytest.raises(ConfigError) as caught:
        plan_of(machine, **settings)
    return caught.value.mistakes


def reason_of(plan, name):
    (choice,) = [choice for choice in plan.choices if choice.name == name]
    return choice.reason


def test_the_default_is_one_worker_here_or_one_for_each_gpu():
    plan = plan_of()

    assert (plan.device, plan.num_processes, plan.start_method) == ("cpu", 1, "inline")
    assert (plan.threads_per_process, plan.process_group_backend) == (4, "gloo")
    assert plan.port is None
    assert plan.warnings == ()
    assert "NVML: no driver" in reason_of(plan, "device")
    assert "num_processes=2" in reason_of(plan, "num_processes")
    assert "4 cores" in reason_of(plan, "num_processes")
    plan = plan_of(with_gpus(2))

    assert (plan.device, plan.num_processes, plan.start_method) == ("cuda", 2, "template")
    assert (plan.threads_per_process, plan.process_group_backend) == (2, "nccl")
    assert plan.warnings == ()
    assert "2 GPUs (H100)" in reason_of(plan, "device")
    alone = plan_of(with_gpus(1))
    assert (alone.device, alone.num_processes, alone.start_method) == ("cuda", 1, "inline")


def test_every_choice_has_a_reason():
    plan = plan_of(num_processes=2)
    assert [choice.name for choice in plan.choices] == [
        "device",
        "num_processes",
        "engine",
        "start_method",
        "threads_per_process",
        "mixed_precision",
        "process_group_backend",
        "use_port",
    ]
    assert all(choice.reason for choice in plan.choices)


@pytest.mark.parametrize(
    ("num_processes", "settings", "method"),
    [
        (1, {"start_method": "fork"}, "fork"),
        (1, {"start_method": "template"}, "template"),
        (2, {}, "template"),
        (2, {"start_method": "fork"}, "fork"),
        (1, {"max_restarts": 1}, "template"),
        (2, {"max_restarts": 1, "start_method": "fork"}, "fork"),
        (1, {"num_nodes": 2, "master_addr": "10.0.0.1"}, "template"),
    ],
)
def test_the_start_method(num_processes, settings, method):
    assert plan_of(num_processes=num_processes, **settings).start_method == method


WITH_TORCH_FOR_CPUS = dataclasses.replace(with_gpus(1), torch_version="2.13.0+cpu")
TPU_WITHOUT_DRIVER = dataclasses.replace(TPU, tpu=dataclasses.replace(TPU.tpu, torch_tpu=""))
TWO_NODES = {"num_nodes": 2, "num_processes": 1, "master_addr": "10.0.0.1"}
AGENT = ("needs torchrun's agent", "nbaccel launch --nnodes 2 --rdzv-backend c10d", 'engine="ray"')


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        (CPU, {**TWO_NODES, "rdzv_backend": "c10d"}, ("rdzv_backend='c10d'", *AGENT)),
        (CPU, {**TWO_NODES, "max_restarts": 1}, ("max_restarts=1 with num_nodes=2", *AGENT)),
        (CPU, {"engine": "elastic"}, ("engine='elastic'", *AGENT)),
        (CPU, {"num_processes": 2, "rdzv_backend": "c10"}, ("rdzv_backend='c10'", "torch elastic")),
        (CPU, {"engine": "deepspeed"}, ("needs hostfile=",)),
        (CPU, {"hostfile": "/no/such/file"}, ("hostfile='/no/such/file' cannot be read",)),
        (CPU, {"device": "cuda"}, ("NVML: no driver", 'Give device="cpu"')),
        (WITH_TORCH_FOR_CPUS, {"device": "cuda"}, ("2.13.0+cpu", "Install a CUDA build")),
        (CPU, {"device": "tpu"}, ("none was found", "PJRT_DEVICE=CPU")),
        (TPU_WITHOUT_DRIVER, {"device": "tpu"}, ("pip install torch_tpu",)),
        (
            TPU,
            {"num_processes": 3},
            ("num_processes=3 is not supported on 8 TPU chips", "num_processes=1, 4 or 8"),
        ),
        (TPU, {"mixed_precision": "fp16"}, ("TPUs compute in bfloat16",)),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_what_to_do(machine, settings, said):
    (message,) = mistakes_of(machine, **settings)
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        (with_gpus(2), {"start_method": "inline"}, ("1 (H100) will be idle",)),
        (with_gpus(1), {"num_processes": 2}, ("NCCL refuses", "2 workers share 1 GPU")),
        (
            with_gpus(4),
            {"num_processes": 2},
            ("2 (H100), 3 (H100) will be idle", "num_processes=4"),
        ),
        (WITH_TORCH_FOR_CPUS, {}, ("Install a CUDA build",)),
        (TPU_WITHOUT_DRIVER, {}, ("8 TPU chips", "pip install torch_tpu")),
        (CPU, {"mixed_precision": "fp16"}, ("fp16", "bf16")),
        (with_gpus(1, (7, 5), "T4"), {"mixed_precision": "bf16"}, ("GPU 0 (T4) of 7.5",)),
        (
            with_gpus(1, (8, 0), "A100"),
            {"mixed_precision": "fp8", "fp8": "native"},
            ("fp8 is emulated on", 'more slowly than in "bf16"'),
        ),
        (
            dataclasses.replace(CPU, host_available_bytes=400 * 2**20),
            {"num_processes": 4},
            ("600.0 MiB", "400.0 MiB"),
        ),
    ],
)
def test_what_trains_otherwise_than_one_might_think_is_warned_of(machine, settings, said):
    (warning,) = plan_of(machine, **settings).warnings
    assert all(part in warning for part in said), warning


def test_where_all_is_well_nothing_is_warned_of_and_settings_that_nobody_reads_are_told():
    assert plan_of(with_gpus(1, (8, 0)), mixed_precision="bf16").warnings == ()
    assert plan_of(with_gpus(1, (8, 9)), mixed_precision="fp8", fp8="native").warnings == ()
    assert plan_of(with_gpus(2), device="cpu", num_processes=2).warnings == ()
    fp8 = {"backend": "native", "opt_level": "O1", "amax_history_len": 16}
    warnings = plan_of(with_gpus(1, (9, 0)), mixed_precision="fp8", fp8=fp8).warnings
    assert "fp8.opt_level='O1' has no effect: native does not read it." in warnings
    assert any("amax_history_len=16 has no effect with recipe='current'" in w for w in warnings)


@pytest.mark.parametrize(
    ("fp8", "machine", "told"),
    [
        ("te", CPU, "is not supported on cpu: it needs the package transformer-engine"),
        ("te", with_gpus(2, (8, 6), "A10"), "GPU 0 (A10) of 8.6, GPU 1 (A10) of 8.6"),
        ({"backend": "native", "recipe": "mxfp8"}, with_gpus(1), "is not one that native has"),
        ({"backend": "te", "recipe": "mxfp8"}, with_gpus(1), "10.0 or newer and below 12.0; this"),
        ({"backend": "ao", "recipe": "rowwise"}, with_gpus(1, (8, 9)), "this one has 8.9"),
        ({"backend": "native", "fp8_format": "E5M2"}, with_gpus(1), "two bits of mantissa"),
    ],
)
def test_eight_bits_that_cannot_be_are_refused(monkeypatch, fp8, machine, told):
    monkeypatch.setattr(capabilities, "is_installed", lambda name: True)
    (message,) = mistakes_of(machine, mixed_precision="fp8", fp8=fp8)
    assert told in message


def test_a_backend_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(capabilities, "is_installed", lambda name: False)
    (message,) = mistakes_of(CPU, mixed_precision="fp8", fp8="te")
    assert "'te' needs transformer_engine, which is not installed" in message
    assert "another backend" in message


@needs.DEEPSPEED_ROW
def test_a_zero_stage_is_a_choice_with_its_reason_and_refuses_levels_of_msamp():
    plan = plan_of(zero_stage=2)
    assert "by DeepSpeed" in reason_of(plan, "zero_stage")
    assert "ZeRO-2" in plan.headline()
    assert plan_of(zero_stage=0).config.zero_stage == 0
    (message,) = mistakes_of(with_gpus(2), mixed_precision="fp8", fp8="msamp", zero_stage=1)
    assert "cuts weights into flat pieces" in message
    plan = plan_of(with_gpus(2), mixed_precision="fp8", fp8="native", zero_stage=1)
    assert plan.strategy == "deepspeed"


def test_hostfiles_and_filters_say_how_many_workers_there_are(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=4\n\n# none\ntwo slots=2\n")
    for filters, num_workers in (({"include": "one:0,3@two"}, 4), ({"exclude": "one"}, 2)):
        plan = plan_of(hostfile=hostfile, **filters)
        assert plan.num_processes == num_workers
    [mistake] = mistakes_of(hostfile=hostfile, include="one:1", num_processes=2)
    assert "the 1 slots of" in mistake
    assert "include='one:1'" in mistake
    assert "names host 'three'" in mistakes_of(hostfile=hostfile, exclude="three")[0]
    plan = plan_of(hostfile=hostfile)
    assert (plan.engine, plan.num_processes, plan.warnings) == ("deepspeed", 6, ())


def test_nodes_multiply_and_meet_at_a_known_port():
    plan = plan_of(num_processes=2, num_nodes=3, master_addr="10.0.0.1")
    assert (plan.num_processes, plan.world_size, plan.port) == (2, 6, 29500)
    assert plan_of(num_processes=2, use_port=1234).port == 1234
    elsewhere = plan_of(num_processes=2, rdzv_endpoint="h:1")
    assert (elsewhere.master_addr, elsewhere.port) == ("h", 1)


@pytest.mark.parametrize(
    ("workers", "asked", "threads", "warned"),
    [
        (1, None, 4, 0),
        (2, None, 2, 0),
        (3, None, 1, 0),
        (8, None, 1, 1),
        (2, 4, 4, 1),
        (2, 1, 1, 0),
    ],
)
def test_threads_share_the_cores(workers, asked, threads, warned):
    plan = plan_of(num_processes=workers, threads_per_process=asked)
    assert plan.threads_per_process == threads
    assert len(plan.warnings) == warned
    if warned:
        assert "4 cores" in plan.warnings[0]


def test_tpus_are_taken_with_a_process_per_chip():
    plan = plan_of(TPU)
    assert (plan.device, plan.num_processes, plan.start_method) == ("tpu", 8, "template")
    assert "torch_tpu 0.2.0" in plan.explain()
    # A single worker is a process of its own, too.
    assert plan_of(TPU, num_processes=1).start_method == "template"


@pytest.mark.parametrize(
    ("installed", "machine", "backend", "reason"),
    [
        ((), CPU, "native", "not ao: torchao is not installed"),
        (("torchao",), CPU, "ao", "torchao is installed"),
        (("torchao", "transformer_engine"), CPU, "ao", "not te: it does not compute on cpu"),
        (("torchao", "transformer_engine"), with_gpus(1, (9, 0)), "te", "transformer_engine is"),
        (("torchao", "transformer_engine"), with_gpus(1, (8, 0)), "ao", "not te: it needs"),
        (("transformer_engine", "msamp"), with_gpus(1, (9, 0)), "msamp", "msamp is installed"),
    ],
)
def test_auto_takes_what_is_installed_and_says_why(
    monkeypatch, installed, machine, backend, reason
):
    monkeypatch.setattr(capabilities, "is_installed", lambda name: name in installed)
    plan = plan_of(machine, mixed_precision="fp8")
    assert {choice.name: choice.value for choice in plan.choices}["fp8.backend"] == backend
    assert reason in reason_of(plan, "fp8.backend")


def test_only_gpus_that_are_used_are_judged_and_all_mistakes_come_at_once(monkeypatch):
    monkeypatch.setattr(capabilities, "is_installed", lambda name: True)
    mixed = dataclasses.replace(
        CPU, gpus=(*with_gpus(1).gpus, *with_gpus(2, (7, 5), "T4").gpus[1:]), torch_version="2.13"
    )
    assert plan_of(mixed, num_processes=1, mixed_precision="fp8", fp8="te").num_processes == 1
    (message,) = mistakes_of(mixed, num_processes=2, mixed_precision="fp8", fp8="te")
    assert "GPU 1 (T4)" in message
    assert "GPU 0" not in message
    # In CUDA's own order the T4 may be the first.
    unsure = dataclasses.replace(mixed, gpu_order_known=False)
    (message,) = mistakes_of(unsure, num_processes=1, mixed_precision="fp8", fp8="te")
    assert "GPU 1 (T4)" in message
    machine = dataclasses.replace(
        with_gpus(1, (7, 5)), torch_version="2.13.0+cpu", memfd_supported=False, platform="win32"
    )
    fp8 = {"backend": "native", "recipe": "block"}
    found = mistakes_of(machine, device="cuda", mixed_precision="fp8", fp8=fp8, num_processes=2)
    assert len(found) == 3


@pytest.mark.parametrize(
    "lacking",
    [
        {"memfd_supported": False, "platform": "darwin"},
        {"fork_supported": False, "platform": "win32"},
    ],
)
def test_other_systems_run_one_worker_only(lacking):
    machine = dataclasses.replace(CPU, **lacking)
    assert plan_of(machine).start_method == "inline"
    for settings in ({"num_processes": 2}, {"start_method": "fork"}, {"max_restarts": 1}):
        with pytest.raises(PlatformUnsupported, match=f"'{lacking['platform']}'.*num_processes=1"):
            plan_of(machine, **settings)


# -------------------- ``gpu_ids``: the plan counts the GPUs that workers will see, and no others


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
    assert resolve(named(setting), CPU).device == "cpu"


def test_numbers_and_slots_are_the_gpus_of_their_machine() -> None:
    part = dataclasses.replace(with_gpus(2), gpu_setting="4,6")
    assert uuids(with_named_gpus(part, "6")[0]) == ["GPU-1"]
    assert "here are 2 GPUs (4, 6)" in with_named_gpus(part, "0")[1]
    hosts = [
        Host(name="one", address="one", slots=2, devices=(0, 2)),
        Host(name="two", address="two", slots=2),
    ]
    machines = {"one": with_gpus(4), "two": with_gpus(2)}
    seen = _named_devices(hosts, machines, RunConfig())
    assert [uuids(seen[name]) for name in seen] == [["GPU-0", "GPU-2"], ["GPU-0", "GPU-1"]]
    with pytest.raises(ConfigError, match=r"host one: .*GPU '2', and here are 1 GPU"):
        _named_devices(hosts, {**machines, "one": with_gpus(1)}, RunConfig())
