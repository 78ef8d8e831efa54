from __future__ import annotations

import dataclasses
import typing

import pytest

from nbaccel.config import RunConfig
from nbaccel.devices.tpu.chips import inspect_host
from nbaccel.devices.tpu.drivers import DriverChoice, choose_driver
from nbaccel.plan.inventory import TpuHost
from tests.devices.tpu.hosts import HOSTS, build_host

BOTH = TpuHost(chips=8, torch_tpu_chips=8, torch_tpu="0.2.0", torch_xla="2.9.0")
OLD = dataclasses.replace(BOTH, chips=4, torch_tpu_chips=0)
BARE = dataclasses.replace(BOTH, torch_tpu="", torch_xla="")
DRY = TpuHost(pjrt_device="CPU", torch_xla="2.9.0")
ASKED = ("auto", "torch_tpu", "torch_xla")


@pytest.mark.parametrize(
    ("asked", "host", "torch_version", "name", "reason"),
    [
        ("auto", BOTH, "2.13.0+cpu", "torch_tpu", "torch_tpu is installed"),
        ("auto", BOTH, "2.11.0", "torch_tpu", "torch_tpu is installed"),
        ("auto", BOTH, "2.15.0", "torch_tpu", "torch_tpu is installed"),
        (
            "auto",
            BOTH,
            "2.9.0",
            "torch_xla",
            "torch_xla is installed; torch_tpu 0.2.0 takes torch 2.11 to 2.15, got 2.9.0",
        ),
        (
            "auto",
            OLD,
            "2.9.0",
            "torch_xla",
            "torch_xla is installed; torch_tpu counts none of the 4 chips",
        ),
        ("torch_tpu", BOTH, "2.12.1", "torch_tpu", "asked for"),
        ("torch_xla", BOTH, "2.9.1+cu128", "torch_xla", "asked for"),
        (
            "torch_xla",
            DRY,
            "2.9.0",
            "torch_xla",
            "asked for; PJRT_DEVICE=CPU: a dry run on the processor, without any TPU chip",
        ),
    ],
)
def test_a_choice_and_its_reason(asked, host, torch_version, name, reason):
    version = getattr(host, name)
    expected = DriverChoice(name=name, version=version, reason=reason)
    assert choose_driver(asked, host, torch_version) == expected


@pytest.mark.parametrize(
    ("asked", "host", "torch_version", "said"),
    [
        ("auto", None, "2.13.0", ["needs a TPU chip", "PJRT_DEVICE=CPU", 'device="cpu"']),
        ("torch_xla", None, "2.9.0", ["needs a TPU chip", "dry run"]),
        ("auto", DRY, "2.9.0", ["needs a TPU chip", 'tpu_driver="torch_xla"']),
        ("torch_tpu", DRY, "2.9.0", ["needs a TPU chip"]),
        (
            "auto",
            dataclasses.replace(BOTH, chips=0, chips_on_bus=8),
            "2.13.0",
            ["could open none", "8 chips on the PCI bus"],
        ),
        (
            "auto",
            BARE,
            "2.13.0",
            ["8 TPU chips", "Google's torch_tpu is not installed", "pip install torch_tpu", "2.15"],
        ),
        ("auto", BOTH, "2.10.0", ["takes torch 2.11 to 2.15, got 2.10.0", "takes torch 2.9, got"]),
        ("torch_tpu", BOTH, "2.9.0", ["got 2.9.0", "pip install torch_tpu, with torch 2.11 to"]),
        ("torch_tpu", OLD, "2.13.0", ["counts none of the 4 chips", 'tpu_driver="torch_xla"']),
        ("torch_tpu", BARE, "2.13.0", ["Google's torch_tpu is not installed"]),
        (
            "torch_xla",
            BARE,
            "2.9.0",
            ["torch_xla is not installed", "pip install 'torch_xla[tpu]'"],
        ),
        ("torch_xla", BOTH, "2.13.0", ["takes torch 2.9, got 2.13.0", "of the same version"]),
        ("torch_xla", BOTH, "", ["takes torch 2.9, got none"]),
        (
            "torch_xla",
            dataclasses.replace(DRY, torch_xla=""),
            "2.9.0",
            ["PJRT_DEVICE=CPU cannot be used", "is not installed", "Run pip"],
        ),
    ],
)
def test_a_refusal_says_the_value_the_cause_and_the_remedy(asked, host, torch_version, said):
    choice = choose_driver(asked, host, torch_version)
    assert (choice.name, choice.version, choice.reason) == ("", "", "")
    assert [part for part in said if part not in choice.refusal] == []
    assert choice.refusal.startswith(f'tpu_driver="{asked}"')
    assert choice.refusal.endswith(".")
    assert ".." not in choice.refusal


def test_a_slice_of_several_hosts_is_refused_and_what_cannot_help_is_not_advised():
    annotation = RunConfig.model_fields["tpu_driver"].annotation
    assert typing.get_args(annotation) == ASKED
    for asked in ASKED:
        refusal = choose_driver(asked, dataclasses.replace(BOTH, num_hosts=4), "2.13.0").refusal
        assert "number 0 of 4" in refusal
        assert "one launch per host" in refusal
    # On a host whose chips torch_tpu does not count, installing it would change nothing.
    bare = dataclasses.replace(OLD, torch_tpu="", torch_xla="")
    refusal = choose_driver("auto", bare, "2.13.0").refusal
    assert "pip install 'torch_xla[tpu]'" in refusal
    assert "pip install torch_tpu" not in refusal


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("colab v5e-1", "torch_tpu"),
        ("colab v6e-1", "torch_xla"),
        ("kaggle v5e-8", "torch_tpu"),
        ("tpu vm v3-8, /dev/accel", "torch_xla"),
        ("container that hides /sys", ""),
        ("one host of a v5e-16 slice", ""),
    ],
)
def test_recorded_hosts(tmp_path, name, driver):
    host = HOSTS[name]
    build_host(host, tmp_path)
    found = inspect_host(host.environ, tmp_path, search_path=[str(tmp_path / "packages")])
    choice = choose_driver("auto", found, dict(host.packages)["torch"])
    assert choice.name == driver
    assert bool(choice.refusal) is not bool(driver)
