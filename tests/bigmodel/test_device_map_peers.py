"""Maps beside those that Accelerate makes: the same, or fewer bytes on slower devices."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.bigmodel import module_sizes
from nbaccel.bigmodel.device_map import clean_device_map, infer_auto_device_map
from nbaccel.plan.inventory import Gpu, Inventory
from tests.bigmodel import map_rules
from tests.bigmodel.families import FAMILIES, build
from tests.bigmodel.map_rules import rules_broken, slow_bytes

peer = pytest.importorskip("accelerate.utils.modeling")

MACHINE = Inventory(
    cpu_cores=4,
    host_total_bytes=1 << 40,
    host_available_bytes=1 << 40,
    gpus=tuple(Gpu(index=number, name="GPU", free_bytes=1 << 30) for number in range(4)),
    torch_version="2.13.0+cu130",
)


def both_maps(model: nn.Module, budgets: dict[Any, int], **options: Any) -> tuple[dict, dict]:
    """Ours and Accelerate's, not cleaned."""
    options |= {"clean_result": False, "offload_buffers": True}
    ours = infer_auto_device_map(model, dict(budgets), inventory=MACHINE, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.infer_auto_device_map(model, dict(budgets), **options)
    return dict(ours), dict(theirs)


def compare(
    model: nn.Module, budgets: dict[Any, int], whole: frozenset[str], **options: Any
) -> str:
    """How the maps differ, and fail where ours is worse or breaks a rule."""
    try:
        ours, theirs = both_maps(model, budgets, no_split_module_classes=list(whole), **options)
    except IndexError:
        return "it raises"
    assert rules_broken(model, ours, budgets, whole) == []
    if ours == theirs:
        return "equal"
    if rules_broken(model, theirs, budgets, whole):
        return "it breaks a rule"
    our_bytes, their_bytes = slow_bytes(model, ours), slow_bytes(model, theirs)
    assert our_bytes[1] <= their_bytes[1], (budgets, ours, theirs)
    if list(map_rules.lack_of_room(model, ours, budgets, whole)):
        assert our_bytes[1] == their_bytes[1], "without room only where nothing else is as good"
    if not list(map_rules.lack_of_room(model, theirs, budgets, whole)):
        assert our_bytes[0] <= their_bytes[0], (budgets, ours, theirs)
    return "as good" if our_bytes == their_bytes else "better"


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("odd", [False, True])
def test_maps_of_random_models_are_those_of_accelerate_or_better(odd, fallback):
    results: Counter = Counter()
    for seed in range(400):
        chance = random.Random(seed)
        model = map_rules.random_model(chance, odd=odd)
        budgets = map_rules.random_budgets(model, chance)
        whole = frozenset({"Block"} if chance.random() < 0.5 else ())
        results[compare(model, budgets, whole, fallback_allocation=fallback)] += 1
    assert results["equal"] > (150 if odd else 280), results
    assert results["better"], results


def test_a_clean_map_is_that_of_accelerate():
    for seed in range(200):
        chance = random.Random(seed)
        model = map_rules.random_model(chance)
        names = [name for name, _ in model.named_parameters()]
        device_map = {name: chance.choice([0, 0, 0, 1]) for name in names}
        assert dict(clean_device_map(dict(device_map))) == peer.clean_device_map(dict(device_map))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [None, "float16", torch.float64])
def test_sizes_are_those_of_accelerate(family, dtype):
    with torch.device("meta"):
        model = build(family, tie_word_embeddings=True)
    model.tie_weights()
    special = {next(name for name, _ in model.named_parameters()): "float64"}
    for options in ({}, {"dtype": dtype}, {"dtype": dtype, "special_dtypes": special}):
        ours = module_sizes.compute_module_sizes(model, **options)
        assert ours == peer.compute_module_sizes(model, **options)
    ours = module_sizes.compute_module_sizes(model, dtype, buffers_only=True)
    assert ours == peer.compute_module_sizes(model, dtype, buffers_only=True)
    assert module_sizes.get_module_leaves(ours) == peer.get_module_leaves(ours)
    assert module_sizes.calculate_maximum_sizes(model) == peer.calculate_maximum_sizes(model)
    tied_in_config = module_sizes.check_tied_parameters_in_config(model)
    assert tied_in_config == peer.check_tied_parameters_in_config(model)
