"""Budgets, and which device each block goes to: single cases, and rules that hold for all."""

from __future__ import annotations

import logging
import math
import random
import time
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from nbaccel.bigmodel.device_map import (
    check_device_map,
    clean_device_map,
    fallback_allocate,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from nbaccel.bigmodel.module_sizes import compute_module_sizes
from nbaccel.errors import ConfigError
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory
from tests.bigmodel import map_rules
from tests.bigmodel.families import build
from tests.bigmodel.map_rules import Block, Stack, device_of, rules_broken

TWO_GPUS = Inventory(
    cpu_cores=4,
    host_total_bytes=1 << 30,
    host_available_bytes=1 << 20,
    gpus=(Gpu(index=0, name="A", free_bytes=250), Gpu(index=1, name="B", free_bytes=300)),
    torch_version="2.13.0+cu130",
)


def linear() -> nn.Module:
    """100 bytes."""
    return nn.Linear(5, 5, bias=False)


def row(*modules: nn.Module, kind=Stack) -> nn.Module:
    return kind({f"m{number}": module for number, module in enumerate(modules)})


def infer(model, max_memory=None, *args, inventory=TWO_GPUS, **options):
    return dict(infer_auto_device_map(model, max_memory, *args, inventory=inventory, **options))


# ------------------------------------------------------------------------------- one by one
def tied() -> nn.Module:
    model = row(*(linear() for _ in range(4)))
    model.m3.weight = model.m0.weight
    return model


def tied_in_a_chain() -> nn.Module:
    """m0 is tied to m1, and m1 to m2: Accelerate raises an IndexError here."""
    parts = [nn.Module() for _ in range(3)]
    first, second = nn.Parameter(torch.zeros(25)), nn.Parameter(torch.zeros(25))
    parts[0].a, parts[1].a, parts[1].b, parts[2].b = first, first, second, second
    return row(*parts, linear(), linear())


def in_two_places() -> nn.Module:
    shared = linear()
    return row(shared, linear(), shared)


def large_inside() -> nn.Module:
    return row(linear(), linear(), nn.Linear(10, 10, bias=False), linear(), linear())


def nested() -> nn.Module:
    return row(row(linear(), linear()), row(linear(), linear(), kind=Block), linear())


def with_a_later_block() -> nn.Module:
    return row(nn.Linear(20, 5), row(nn.Linear(20, 5), linear()))


INT8 = {"m0.weight": torch.int8, "m1.weight": "float16"}
FALLBACK = {"fallback_allocation": True}
BLOCK = {"no_split_module_classes": ["Block"]}
CASES = {
    "what fits goes to the first device as a whole": [(2, {0: 200, "cpu": 1000}, {}, {"": 0})],
    "room is kept for the largest layer that is brought back": [
        (3, {0: 299, "cpu": 1000}, {}, {"m0": 0, "m1": "cpu", "m2": "cpu"}),
        (3, {0: 300, "cpu": 1000}, {}, {"": 0}),
    ],
    # The large layer goes to device 1, so that device 0 need not have room for it.
    "room is kept for layers of slow devices only": [
        (
            large_inside,
            {0: 300, 1: 400, "cpu": 1000},
            {},
            {"m0": 0, "m1": 0, "m2": 1, "m3": "cpu", "m4": "cpu"},
        )
    ],
    "the host keeps room for what is on the disk": [
        (3, {"cpu": 150, "disk": 1000}, {}, {"": "disk"}),
        (3, {"cpu": 200}, {}, {"m0": "cpu", "m1": "disk", "m2": "disk"}),
    ],
    # Accelerate keeps room on 0 for what lies on 1, and puts the last layer on the host.
    "no room is kept where nothing is brought back": [
        (4, {0: 250, 1: 250, "cpu": 1000}, {}, {"m0": 0, "m1": 0, "m2": 1, "m3": 1})
    ],
    # Device 1 is the first in use, and must have room for what is on the host.
    "nothing is brought back to a device that stays empty": [
        (4, {0: 0, 1: 300, "cpu": 1000}, {}, {"m0": 1, "m1": 1, "m2": "cpu", "m3": "cpu"})
    ],
    "a disk without a budget takes everything": [(1, {0: 10, "cpu": 10}, {}, {"m0": "disk"})],
    "the machine is the budget where none is given": [
        (6, None, {}, {"m0": 0, "m1": 1, "m2": 1, "m3": 1, "m4": "cpu", "m5": "cpu"})
    ],
    "blocks are split unless their class forbids it": [
        (nested, {0: 400, "cpu": 1000}, {}, {"m0": 0, "m1.m0": 0, "m1.m1": "cpu", "m2": "cpu"}),
        (nested, {0: 400, "cpu": 1000}, BLOCK, {"m0": 0, "m1": "cpu", "m2": "cpu"}),
        (lambda: nested().m1, {0: 150, "cpu": 1000}, BLOCK, {"": "cpu"}),
    ],
    "what is tied shares a device": [
        (tied, {0: 200, "cpu": 1000}, {}, {"m0": 0, "m3": 0, "m1": "cpu", "m2": "cpu"}),
        (
            tied_in_a_chain,
            {0: 300, "cpu": 1000},
            {},
            {"m0": 0, "m1": 0, "m2": 0, "m3": "cpu", "m4": "cpu"},
        ),
        (
            in_two_places,
            {0: 200, "cpu": 1000},
            {"clean_result": False},
            {"m0": 0, "m2": 0, "m1": 0},
        ),
    ],
    "a model without submodules has tensors": [
        (linear, {0: 100}, {}, {"weight": 0}),
        (nn.Module, {0: 100}, {}, {}),
    ],
    "a format makes room": [
        (2, {0: 100, "cpu": 1000}, {"dtype": "float16"}, {"": 0}),
        (2, {0: 75, "cpu": 1000}, {"special_dtypes": INT8}, {"": 0}),
    ],
    "a device that would stay empty takes a later block": [
        (with_a_later_block, {0: 520, "cpu": 2000}, {}, {"": "cpu"}),
        (
            with_a_later_block,
            {0: 520, "cpu": 2000},
            FALLBACK,
            {"m1.m1": 0, "m0": "cpu", "m1.m0": "cpu"},
        ),
    ],
}


@pytest.mark.parametrize("rule", CASES)
def test_where_blocks_go(rule):
    for made, budgets, options, expected in CASES[rule]:
        model = row(*(linear() for _ in range(made))) if isinstance(made, int) else made()
        assert infer(model, budgets, **options) == expected


def test_tensors_beside_submodules_have_devices_too():
    model = row(row(linear(), linear()))
    model.m0.register_buffer("mask", torch.zeros(5))
    model.m0.scale = nn.Parameter(torch.zeros(5))
    model.last = nn.Parameter(torch.zeros(5))
    with pytest.warns(UserWarning, match="offload_buffers"):
        device_map = infer(model, {0: 245, "cpu": 1000}, clean_result=False)
    assert device_map == {"last": 0, "m0.scale": 0, "m0.m0": 0, "m0.m1": 0, "m0.mask": "cpu"}


def test_decisions_empty_devices_and_weights_that_are_not_tied_are_told(caplog):
    model = row(linear(), linear())
    with caplog.at_level(logging.INFO, "nbaccel"):
        infer(model, {0: 100, "cpu": 1000})
        assert "put on cpu" not in caplog.text
        assert "insufficient memory" in caplog.text
        assert "{0: 200}" in caplog.text
        infer(model, {0: 100, "cpu": 1000}, verbose=True)
    assert "m1: put on cpu, 100 bytes" in caplog.text
    with torch.device("meta"):
        model = build("gpt2")
        model.lm_head.weight = nn.Parameter(torch.zeros(200, 32))
    with caplog.at_level(logging.WARNING, "nbaccel"):
        infer(model, {0: 10**6})
    assert "tie_weights" in caplog.text


# ------------------------------------------------------------------------------- buffers
def with_buffers() -> nn.Module:
    model = row(linear(), linear(), linear())
    for name in ("m1", "m2"):
        getattr(model, name).register_buffer("mask", torch.zeros(25))
    return model


def test_buffers_of_offloaded_layers_without_room_are_warned_of():
    with pytest.warns(UserWarning, match="200 B.*offload_buffers=True"):
        assert infer(with_buffers(), {0: 350, "cpu": 1000}) == {"m0": 0, "m1": "cpu", "m2": "cpu"}
    small = row(linear(), linear(), linear())
    small.m1.register_buffer("mask", torch.zeros(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer(with_buffers(), {0: 350, "cpu": 1000}, offload_buffers=True)
        infer(with_buffers(), {"cpu": 300, "disk": 1000})
        assert infer(small, {0: 319, "cpu": 1000}) == {"m0": 0, "m1": "cpu", "m2": "cpu"}


# ------------------------------------------------------------------------------- too small
def test_what_does_not_fit_the_budgets_or_the_model_is_told():
    model = row(linear(), linear(), linear(), linear())
    with pytest.raises(ConfigError) as caught:
        infer(model, {0: 200, "cpu": 0, "disk": 250})
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["0", "200", "B", "100", "B", "m1", "100", "B"] in lines
    assert ["cpu", "0", "B", "0", "B", "m1", "100", "B"] in lines
    assert ["disk", "250", "B", "200", "B", "m3", "100", "B"] in lines
    model = row(linear(), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match=r"m1\.weight, m1\.bias, m1\.running_mean") as caught:
        check_device_map(model, {"m0": 0})
    assert isinstance(caught.value, ValueError)
    assert "m0" not in str(caught.value)
    check_device_map(model, {"m0": 0, "m1": "cpu"})
    check_device_map(model, {"": "cpu"})
    model = row(linear(), linear())
    with pytest.warns(UserWarning, match=r"do not match any submodules.*\['m7'\]"):
        check_device_map(model, {"m0.weight": 0, "m1": 0, "m7": 1})


# ------------------------------------------------------------------------------- maps
CLEANED = [
    ({"a": 0, "b": 0}, {"": 0}),
    ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 0}, {"a": 0, "b.x": 1, "b.y": 0}),
    ({"a.b.x": 0, "a.b.y": 0, "a.c": 1}, {"a.b": 0, "a.c": 1}),
    ({"a.b": 0}, {"a.b": 0}),
    # A module's own device is not overridden.
    ({"a": 1, "a.x": 0, "a.y": 0, "b": 1}, {"a": 1, "a.x": 0, "a.y": 0, "b": 1}),
    # Where the first name stood.
    ({"a.x": 1, "b": 0, "a.y": 1}, {"a": 1, "b": 0}),
    ({}, {}),
]


def test_cleaning_names_modules_whose_parts_lie_together():
    for device_map, cleaned in CLEANED:
        assert list(clean_device_map(device_map).items()) == list(cleaned.items())
        assert device_map == cleaned, "in place"
    below = {"a.x": 0, "a.y": 0, "ab.x": 0, "ab.y": 0}
    assert clean_device_map(below, "a") == {"a": 0, "ab.x": 0, "ab.y": 0}


def test_a_block_is_found_and_taken_out():
    model = row(nn.Linear(20, 5), row(nn.Linear(20, 5), linear()), linear())
    parts, sizes = list(model.named_children()), compute_module_sizes(model)
    name, found, rest = fallback_allocate(parts, sizes, 150)
    assert (name, found) == ("m1.m1", model.m1.m1)
    assert [part_name for part_name, _ in rest] == ["m0", "m1.m0", "m2"]
    name, found, rest = fallback_allocate(parts, sizes, "150B", ["Stack"])
    assert (name, [part_name for part_name, _ in rest]) == ("m2", ["m0", "m1"])
    assert fallback_allocate(parts, sizes, 99) == (None, None, parts)
    assert fallback_allocate(parts, sizes, -1) == (None, None, parts)


# ------------------------------------------------------------------------------- all of them
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), fallback=st.booleans(), whole=st.booleans())
def test_no_map_breaks_a_rule(seed, fallback, whole):
    chance = random.Random(seed)
    model = map_rules.random_model(chance)
    budgets = map_rules.random_budgets(model, chance)
    classes = frozenset({"Block"} if whole else ())
    options = {"fallback_allocation": fallback, "offload_buffers": True}
    full = infer(model, budgets, classes, clean_result=False, **options)
    assert rules_broken(model, full, budgets, classes) == []
    assert infer(model, budgets, classes, clean_result=False, **options) == full
    cleaned = infer(model, budgets, classes, **options)
    assert all(
        device_of(name, full) == device_of(name, cleaned) for name in map_rules.all_tensors(model)
    )
    check_device_map(model, cleaned)


def test_a_thousand_layers_take_less_than_a_second():
    def block() -> nn.Module:
        return row(linear(), linear(), row(linear(), nn.GELU(), linear()), kind=Block)

    with torch.device("meta"):
        model = row(linear(), row(*(block() for _ in range(1000))), linear())
    model.m2.weight = model.m0.weight
    budgets = {**dict.fromkeys(range(8), 40_000), "cpu": 50_000}
    for options in ({"no_split_module_classes": ["Block"]}, {"fallback_allocation": True}):
        start = time.process_time()
        infer(model, budgets, **options)
        assert time.process_time() - start < 1


# ------------------------------------------------------------------------------- budgets
GIB = 1 << 30


def machine(*free_gib: int) -> Inventory:
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
    )


def layered(num_layers: int = 10) -> nn.Module:
    """Layers of 80 bytes each."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


def test_budgets_are_what_is_free_on_a_machine():
    expected = {0: 100 * GIB, 1: 20 * GIB, "cpu": 48 * GIB}
    assert get_max_memory(inventory=machine(100, 20)) == expected
    budgets = get_max_memory()
    assert budgets["cpu"] == pytest.approx(inspect_machine().host_available_bytes, rel=0.2)
    assert "disk" not in budgets
    budgets = get_balanced_memory(layered(), inventory=machine(100))
    assert budgets == {0: int(0.9 * 100 * GIB), "cpu": 48 * GIB}


def test_memory_that_host_and_gpu_share_is_given_once(monkeypatch):
    # A launch does not take such a GPU by itself, because nobody has run it yet.
    monkeypatch.setattr(
        "nbaccel.plan.registry.usable_units", lambda inventory: inventory.accelerators
    )
    mac = replace(machine(), accelerators=(Gpu(index=0, name="Apple GPU", kind="mps"),))
    assert get_max_memory(inventory=mac) == {"mps": 48 * GIB}


def test_sizes_are_read_and_devices_sorted_and_all_mistakes_are_told():
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
    with pytest.raises(ConfigError) as caught:
        get_max_memory({"cuda:0": "5GiB", -1: 5, True: 5, "cpu": "much", "disk": -3, 0: math.nan})
    assert len(caught.value.mistakes) == 6
    for value in ("'cuda:0'", "-1", "True", "'much'", "-3", "nan"):
        assert value in str(caught.value)


def test_devices_that_are_not_there_or_tell_nothing_are_told(caplog):
    get_max_memory({0: 5, "cpu": 6}, inventory=machine(1))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nbaccel"):
        assert get_max_memory({0: 5, 1: 6, 2: 7}, inventory=machine(1)) == {0: 5, 1: 6, 2: 7}
    assert len(caplog.records) == 1
    assert "not available: [1, 2]" in caplog.text
    silent = replace(machine(), gpus=(Gpu(index=0, name="Odd GPU"),))
    assert get_max_memory(inventory=silent)[0] == 0
    assert "Odd GPU" in caplog.text


# ------------------------------------------------------------------------------- balance


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
