"""Budgets: given, found on a machine, and balanced."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.device_map import get_balanced_memory, get_max_memory
from nbaccel.errors import ConfigError
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory

GIB = 1 << 30


def machine(*free_gib: int, **facts) -> Inventory:
    gpus = tuple(
        Gpu(index=number, name="H200", free_bytes=free * GIB, total_bytes=140 * GIB)
        for number, free in enumerate(free_gib)
    )
    return Inventory(
        cpu_cores=4,
        host_total_bytes=64 * GIB,
        host_available_bytes=48 * GIB,
        gpus=gpus,
        torch_version="2.13.0+cu130",
        **facts,
    )


def layered(num_layers: int = 10) -> nn.Module:
    """Layers of 80 bytes each."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


def test_what_is_free_on_a_machine_of_two_gpus():
    expected = {0: 100 * GIB, 1: 20 * GIB, "cpu": 48 * GIB}
    assert get_max_memory(inventory=machine(100, 20)) == expected


def test_this_machine_is_asked_where_none_is_described():
    budgets = get_max_memory()
    assert budgets["cpu"] == pytest.approx(inspect_machine().host_available_bytes, rel=0.2)
    assert "disk" not in budgets


def test_memory_that_host_and_gpu_share_is_given_once(monkeypatch):
    # A launch does not take such a GPU by itself, because nobody has run it yet.
    monkeypatch.setattr(
        "nbaccel.plan.registry.usable_units", lambda inventory: inventory.accelerators
    )
    mac = Inventory(
        cpu_cores=8,
        host_total_bytes=16 * GIB,
        host_available_bytes=9 * GIB,
        accelerators=(Gpu(index=0, name="Apple GPU", kind="mps"),),
    )
    assert get_max_memory(inventory=mac) == {"mps": 9 * GIB}


def test_sizes_are_read_and_devices_sorted_and_the_users_own_is_not_changed():
    given = {"disk": "1TB", "cpu": "5GiB", 1: 300, 0: "200MB", "mps": 2.5}
    before = dict(given)
    budgets = get_max_memory(given, inventory=machine(1, 1))
    assert list(budgets.items()) == [
        (0, 200_000_000),
        (1, 300),
        ("mps", 2),
        ("cpu", 5 * GIB),
        ("disk", 10**12),
    ]
    assert given == before


def test_an_infinite_budget_is_larger_than_any_model():
    assert get_max_memory({"cpu": math.inf})["cpu"] > 1 << 60


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        get_max_memory({"cuda:0": "5GiB", -1: 5, True: 5, "cpu": "much", "disk": -3, 0: math.nan})
    assert len(caught.value.mistakes) == 6
    for value in ("'cuda:0'", "-1", "True", "'much'", "-3", "nan"):
        assert value in str(caught.value)


def test_devices_that_are_not_there_are_warned_of_once_and_kept(caplog):
    get_max_memory({0: 5, "cpu": 6}, inventory=machine(1))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nbaccel"):
        assert get_max_memory({0: 5, 1: 6, 2: 7}, inventory=machine(1)) == {0: 5, 1: 6, 2: 7}
    assert len(caplog.records) == 1
    assert "not available: [1, 2]" in caplog.text


def test_a_driver_that_tells_nothing_is_reported(caplog):
    silent = Inventory(
        cpu_cores=1,
        host_total_bytes=GIB,
        host_available_bytes=GIB,
        gpus=(Gpu(index=0, name="Odd GPU"),),
        torch_version="2.13.0+cu130",
    )
    assert get_max_memory(inventory=silent)[0] == 0
    assert "Odd GPU" in caplog.text


# ------------------------------------------------------------------------------- balance
def test_a_single_accelerator_found_on_the_machine_is_used_to_nine_tenths():
    budgets = get_balanced_memory(layered(), inventory=machine(100))
    assert budgets == {0: int(0.9 * 100 * GIB), "cpu": 48 * GIB}


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ({0: 500, "cpu": 900}, {}, {0: 500, "cpu": 900}),  # one alone keeps what was given
        # Equal shares, and the last keeps all: a half of 800, and 1.25 layers of 80.
        ({0: 700, 1: 700, "cpu": 9}, {}, {0: 500, 1: 700, "cpu": 9}),
        ({0: 0, 2: 700, 5: 700}, {}, {0: 0, 2: 500, 5: 700}),  # one with 0 takes no share
        ({0: 700, 1: 700}, {"dtype": "float16"}, {0: 250, 1: 700}),
        # The first gets what the others have no room for.
        ({0: 350, 1: 350, 2: 350}, {"low_zero": True}, {0: 100, 1: 350, 2: 350}),
        ({1: 350, 4: 350, 6: 350}, {"low_zero": True}, {1: 100, 4: 350, 6: 350}),
        ({0: 900, 1: 900, 2: 900}, {"low_zero": True}, {0: 0, 1: 500, 2: 900}),
    ],
)
def test_budgets_are_balanced(given, options, expected):
    assert get_balanced_memory(layered(), given, inventory=machine(1, 1, 1), **options) == expected


def test_a_block_that_is_not_split_makes_the_share_larger():
    with torch.device("meta"):
        model = nn.Sequential(layered(5), layered(5))
    budgets = get_balanced_memory(
        model, {0: 5000, 1: 5000}, no_split_module_classes={"Sequential"}, inventory=machine(1, 1)
    )
    assert budgets == {0: 400 + 500, 1: 5000}


@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_the_numbers_are_those_of_accelerate(num_devices, low_zero):
    peer = pytest.importorskip("accelerate.utils.modeling")
    for budget in (0, 70, 250, 333, 900, 4000):
        given = {**dict.fromkeys(range(num_devices), budget), "cpu": 1000}
        for classes in (None, ["Linear"], ["Sequential"]):
            ours = get_balanced_memory(layered(), given, classes, low_zero=low_zero)
            assert ours == peer.get_balanced_memory(
                layered(), dict(given), classes, low_zero=low_zero
            )
