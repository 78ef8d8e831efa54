"""Devices that nobody has run: found without waking them, passed over by auto, named as such."""

from __future__ import annotations

import dataclasses
import platform

import pytest

from nbaccel import RunConfig, resolve
from nbaccel.config.capabilities import DEVICES
from nbaccel.devices import never_run
from nbaccel.devices.never_run import MpsDevice, XpuDevice
from nbaccel.errors import ConfigError
from nbaccel.plan import Gpu, Inventory

NOTHING = Inventory(cpu_cores=4, host_total_bytes=2**35, host_available_bytes=2**34)
NEVER_RUN = [row.name for row in DEVICES if row.never_run]


def with_one(kind):
    return dataclasses.replace(NOTHING, accelerators=(Gpu(index=0, name="new", kind=kind),))


def test_intels_cards_are_found_by_their_vendor(tmp_path, monkeypatch):
    for number, vendor in enumerate(("0x8086", "0x10de", "0x8086")):
        folder = tmp_path / f"renderD{128 + number}" / "device"  # codespell:ignore
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(never_run, "_CARDS", tmp_path)
    found = XpuDevice().detect({})["accelerators"]
    assert [(unit.kind, unit.index) for unit in found] == [("xpu", 0), ("xpu", 1)]
    monkeypatch.setattr(never_run, "_CARDS", tmp_path / "none")
    assert XpuDevice().detect({}) == {"accelerators": ()}


def test_a_mac_has_one(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    (unit,) = MpsDevice().detect({})["accelerators"]
    assert unit.kind == "mps"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert MpsDevice().detect({}) == {}


@pytest.mark.parametrize("name", NEVER_RUN)
def test_auto_passes_over_it_and_says_how_to_try(name):
    plan = resolve(RunConfig(), with_one(name))
    assert plan.device == "cpu"
    (warning,) = plan.warnings
    assert "found and not used: nbaccel has never been run on it" in warning
    assert f'device="{name}" tries it' in warning


@pytest.mark.parametrize("name", NEVER_RUN)
def test_who_asks_for_it_is_told(name):
    plan = resolve(RunConfig(device=name), with_one(name))
    assert (plan.device, plan.num_processes) == (name, 1)
    (warning,) = plan.warnings
    assert "has never been run with nbaccel" in warning
    with pytest.raises(ConfigError, match=f'device="{name}" needs .* none was found'):
        resolve(RunConfig(device=name), NOTHING)


def test_a_device_that_only_this_process_can_use_takes_no_second_one():
    with pytest.raises(ConfigError, match='start_method="template" is not supported on mps'):
        resolve(RunConfig(device="mps", num_processes=2), with_one("mps"))


def test_an_inventory_with_such_a_device_can_be_written_down():
    machine = dataclasses.replace(with_one("xpu"), problems=("a package is broken",))
    assert Inventory.from_json(machine.to_json()) == machine
