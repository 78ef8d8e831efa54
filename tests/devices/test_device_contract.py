"""One suite for every device that has an implementation."""

from __future__ import annotations

import dataclasses
import platform
import sys

import pytest

from nbaccel import RunConfig, resolve
from nbaccel.abc.device import Device, DeviceRuntime, LaunchHooks, StepHooks
from nbaccel.config.capabilities import DEVICES
from nbaccel.devices import cpu_xpu_mps
from nbaccel.devices.cpu_xpu_mps import MpsDevice, XpuDevice
from nbaccel.errors import ConfigError
from nbaccel.plan import Gpu, Inventory, inspect_machine, registry
from tests.programs import run_program


def run(code):
    return run_program([sys.executable, "-c", code], check=False)


@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.name)
def test_what_holds_without_the_hardware(row):
    for part in (Device, DeviceRuntime, LaunchHooks, StepHooks):
        methods = [name for name, value in vars(part).items() if callable(value) and name[0] != "_"]
        assert len(methods) <= 12, f"{part.__name__}: {methods}"
    assert not Device.__abstractmethods__, "a device writes what differs, and nothing else"
    device = registry.device(row.name)
    found = inspect_machine()
    assert device.name == row.name
    assert device.row == row
    assert vars(device) == {}
    assert bool(device.units(found)) or row is DEVICES[0] or device.refusal(found)
    assert device.launch_problem(found, RunConfig(), 1) == ""
    assert device.plan_warnings(found, RunConfig()) == ()
    assert set(device.detect({})) <= {field.name for field in dataclasses.fields(Inventory)}
    assert device.process_group_backend(10_000) == row.shared_group_backend
    assert device.profiler_activities()[0] == "cpu"
    assert isinstance(device.is_available(), bool)


@pytest.mark.slow
@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.name)
def test_looking_for_hazards_wakes_nothing(row):
    done = run(
        "import os, sys\n"
        "from nbaccel.plan import registry\n"
        f"assert registry.device({row.name!r}).hazards() == ()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"assert registry.device({row.name!r}).hazards() == ()\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "row",
    [
        # Only what wakes the hardware needs it; the rest must hold on any machine.
        pytest.param(row, id=row.name, marks=() if row.name == "cpu" else pytest.mark.gpu)
        for row in DEVICES
    ],
)
def test_a_worker_computes_on_its_device(row):
    found = inspect_machine()
    if row is not DEVICES[0] and registry.device(row.name).refusal(found):
        pytest.skip(f"no {row.name} here: {found.gpu_note}")
    done = run(
        "import torch\n"
        "from nbaccel.plan import registry\n"
        f"device = registry.device({row.name!r})\n"
        "for local_rank in (0, 1):\n"
        "    device.enter_worker(local_rank)\n"
        "    place = device.torch_device(local_rank)\n"
        f"    assert place.type == {row.name!r}\n"
        "    weight = torch.ones(64, 64, device=place, requires_grad=True)\n"
        "    (torch.ones(64, 64, device=place) @ weight).sum().backward()\n"
        "    assert weight.grad.sum().item() == 64.0 ** 3\n"
        "    if place.index is not None:\n"
        "        assert torch.accelerator.current_device_index() == place.index\n"
        "state = device.random_state()\n"
        "first = torch.rand(3, device=place)\n"
        "device.set_random_state(state)\n"
        "assert torch.equal(torch.rand(3, device=place), first)\n"
        "device.synchronize()\n"
        "device.empty_cache()\n"
        "held = device.reserved_bytes(place)\n"
        "assert held is None or held >= 0\n"
    )
    assert done.returncode == 0, done.stderr


NOTHING = Inventory(cpu_cores=4, host_total_bytes=2**35, host_available_bytes=2**34)
NEVER_RUN = [row.name for row in DEVICES if row.never_run]


def with_one(kind):
    return dataclasses.replace(NOTHING, accelerators=(Gpu(index=0, name="new", kind=kind),))


def test_intels_cards_are_found_by_their_vendor_and_that_of_a_mac_by_its_processor(
    tmp_path, monkeypatch
):
    for number, vendor in enumerate(("0x8086", "0x10de", "0x8086")):
        folder = tmp_path / f"renderD{128 + number}" / "device"  # codespell:ignore
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(cpu_xpu_mps, "_CARDS", tmp_path)
    found = XpuDevice().detect({})["accelerators"]
    assert [(unit.kind, unit.index) for unit in found] == [("xpu", 0), ("xpu", 1)]
    monkeypatch.setattr(cpu_xpu_mps, "_CARDS", tmp_path / "none")
    assert XpuDevice().detect({}) == {"accelerators": ()}
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    (unit,) = MpsDevice().detect({})["accelerators"]
    assert unit.kind == "mps"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert MpsDevice().detect({}) == {}


@pytest.mark.parametrize("name", NEVER_RUN)
def test_auto_passes_over_it_and_who_asks_for_it_is_told(name):
    plan = resolve(RunConfig(), with_one(name))
    assert plan.device == "cpu"
    (warning,) = plan.warnings
    assert "found and not used: nbaccel has never been run on it" in warning
    assert f'device="{name}" tries it' in warning
    plan = resolve(RunConfig(device=name), with_one(name))
    assert (plan.device, plan.num_processes) == (name, 1)
    (warning,) = plan.warnings
    assert "has never been run with nbaccel" in warning
    with pytest.raises(ConfigError, match=f'device="{name}" needs .* none was found'):
        resolve(RunConfig(device=name), NOTHING)
    if name == "mps":  # only this process can use it
        with pytest.raises(ConfigError, match='start_method="template" is not supported on mps'):
            resolve(RunConfig(device="mps", num_processes=2), with_one("mps"))
