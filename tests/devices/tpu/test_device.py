"""What a launch on TPU chips is told, as far as that can be asked without a driver."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.base import env
from nbaccel.config import RunConfig
from nbaccel.devices.tpu import chips
from nbaccel.errors import UnsafeMoment
from nbaccel.plan import Inventory, TpuHost, registry, resolve
from nbaccel.workers.worker_processes import check_requirements
from tests.devices.tpu.hosts import install_package
from tests.programs import run_program

GIB = 2**30
V5E = TpuHost(
    generation="v5e",
    chips=4,
    chips_on_bus=4,
    torch_tpu_chips=4,
    bytes_per_chip=16 * GIB,
    process_counts=(1, 4),
    torch_tpu="0.2.0",
)
MACHINE = Inventory(
    cpu_cores=4,
    host_total_bytes=64 * GIB,
    host_available_bytes=48 * GIB,
    tpu_chips=4,
    tpu=V5E,
    torch_version="2.13.0",
)
DRY_RUN = dataclasses.replace(
    MACHINE, tpu_chips=0, tpu=TpuHost(torch_xla="2.9.0", pjrt_device="CPU"), torch_version="2.9.0"
)


def plan_of(machine=MACHINE, **settings):
    return resolve(RunConfig(**settings), machine)


def variables_of(plan):
    return registry.device("tpu").launch_variables(plan)


def test_chips_are_units_with_their_memory_and_each_launch_has_addresses_of_its_own():
    units = registry.device("tpu").units(MACHINE)
    assert [unit.name for unit in units] == ["TPU v5e"] * 4
    assert registry.usable_units(MACHINE) == units
    assert all(unit.total_bytes == unit.free_bytes == 16 * GIB for unit in units)
    first, second = variables_of(plan_of()), variables_of(plan_of())
    assert len(first) == 4
    assert first[0]["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    addresses = [v[0]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",") for v in (first, second)]
    assert all(len(set(of_launch)) == 4 for of_launch in addresses)
    assert addresses[0] != addresses[1]


def test_what_another_launch_has_left_is_removed_and_settings_of_the_user_stay():
    stale = {"TPU_PROCESS_BOUNDS": "1,1,1", "TORCH_TPU_TOPOLOGY": "1,1,1", "TPU_VISIBLE_CHIPS": "3"}
    own = {"LIBTPU_INIT_ARGS": "--x=1", "TPU_WORKER_ID": "0"}
    with env.applied({**stale, **own}):
        (worker, *_) = variables_of(plan_of())
        (alone,) = variables_of(plan_of(num_processes=1))
    assert worker["TPU_PROCESS_BOUNDS"] is None
    assert worker["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert alone["TORCH_TPU_TOPOLOGY"] is None
    assert alone["TPU_VISIBLE_CHIPS"] is None
    assert not own.keys() & worker.keys()


def test_workers_of_torch_xla_have_a_chip_each_and_no_fully_sharded_training():
    host = dataclasses.replace(V5E, torch_tpu="", torch_xla="2.9.0")
    machine = dataclasses.replace(MACHINE, tpu=host, torch_version="2.9.0")
    workers = variables_of(plan_of(machine))
    assert [worker["TPU_VISIBLE_CHIPS"] for worker in workers] == ["0", "1", "2", "3"]
    assert {worker["PJRT_DEVICE"] for worker in workers} == {"TPU"}
    assert plan_of(strategy="fsdp", num_processes=4).strategy == "fsdp"
    with pytest.raises(ValueError, match=r'strategy="fsdp" needs a process group.*torch_tpu'):
        plan_of(machine, strategy="fsdp")


def test_a_dry_run_takes_any_number_of_workers_and_says_that_it_is_one():
    plan = plan_of(DRY_RUN, device="tpu", num_processes=3)
    assert any(warning.startswith("PJRT_DEVICE=CPU") for warning in plan.warnings)
    assert "torch_xla 2.9.0" in plan.explain()
    with env.applied({"PJRT_DEVICE": "CPU"}):
        workers = variables_of(plan)
    assert [worker["PJRT_DEVICE"] for worker in workers] == ["CPU"] * 3
    # Nobody gets it without asking.
    assert plan_of(DRY_RUN).device == "cpu"


def test_who_holds_the_chips_is_told_with_the_way_out(tmp_path):
    files = tuple(str(tmp_path / str(number)) for number in range(4))
    for file in files:
        Path(file).touch()
    host = dataclasses.replace(V5E, device_files=files)
    plan = plan_of(dataclasses.replace(MACHINE, tpu=host))
    assert registry.device("tpu").busy_reason(plan) == ""
    with (
        Path(files[0]).open(),
        pytest.raises(UnsafeMoment, match=r"held by this notebook's kernel") as e,
    ):
        check_requirements(plan)
    assert "torch.manual_seed" in str(e.value)
    assert "%load_ext nbaccel before torch" in str(e.value)
    code = "import sys; kept = open(sys.argv[1]); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, files[2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(UnsafeMoment, match=rf"held by process {holder.pid} \(.*python"):
            check_requirements(plan)
        holder.communicate(b"\n")


def test_a_kernel_is_kept_asleep_where_torch_tpu_is_installed_and_torch_not_imported(tmp_path):
    install_package(tmp_path, "torch_tpu", "0.2.0")
    code = (
        "import sys, os\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "from nbaccel.plan import registry\n"
        "if len(sys.argv) > 1: os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = sys.argv[1]\n"
        "registry.prepare_notebook()\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))\n"
        "print(registry.device('tpu').idle_variables())\n"
    )
    unset = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    for given, expected in (((), "0"), (("1",), "1")):
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": ""} if given else unset
        done = run_program([sys.executable, "-c", code, *given], env=environ)
        set_to, idle = done.stdout.split("\n")[:2]
        assert set_to == expected
        assert idle == "{'TORCH_DEVICE_BACKEND_AUTOLOAD': '0'}"
    # Without torch_tpu nothing is set.
    if chips.inspect_host({}) is None and not registry.device("tpu").idle_variables():
        with env.applied({"TORCH_DEVICE_BACKEND_AUTOLOAD": None}):
            assert registry.prepare_notebook() == ""
            assert env.read("TORCH_DEVICE_BACKEND_AUTOLOAD") is None
