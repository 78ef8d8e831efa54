"""Sizes of modules, layers and ties, in bytes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.module_sizes import (
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_module_size_with_ties,
)
from nbaccel.config.enumerations import CustomDtype
from nbaccel.errors import ConfigError


def encoder() -> nn.Module:
    """Bytes: embed 320, body.0 144 (weights 128 and 16), body.1 72, head 320 (the embed's)."""
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 4),
            "body": nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(4)),
            "head": nn.Linear(4, 20, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    return model


SPECIAL = {"embed.weight": torch.float64}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Floats become smaller, and integers stay.
        *(
            ({"dtype": dtype}, {"embed": 160, "body.1.num_batches_tracked": 8})
            for dtype in (torch.float16, "float16", "torch.float16")
        ),
        ({"dtype": "float64"}, {"embed": 320}),  # nothing becomes larger
        # Below a byte the bits count.
        ({"dtype": CustomDtype.INT4}, {"embed": 40}),
        ({"dtype": "int4"}, {"embed": 40}),
        ({"dtype": "float16", "special_dtypes": SPECIAL}, {"embed": 640, "body.0": 64}),
    ],
)
def test_formats_count(options, expected):
    sizes = compute_module_sizes(encoder(), **options)
    assert {name: sizes[name] for name in expected} == expected


@pytest.mark.parametrize("dtype", ["half-precision", "nn", "torch.linear"])
def test_what_is_no_format_is_refused_with_its_name(dtype):
    with pytest.raises(ConfigError, match=dtype):
        compute_module_sizes(encoder(), dtype=dtype)


def test_buffers_alone_and_what_is_tied_counts_once():
    model = encoder()
    model.register_buffer("mask", torch.zeros(10))
    assert compute_module_total_buffer_size(model) == 80
    assert compute_module_total_buffer_size(model, dtype="float16") == 44
    assert compute_module_total_buffer_size(nn.Linear(2, 2)) == 0
    sizes = {"a": 30, "a.weight": 20, "b": 25, "b.weight": 20, "c": 20}
    parts = [("b", nn.Linear(1, 1)), ("c", nn.Parameter(torch.zeros(5)))]
    size, names, found = get_module_size_with_ties(["b.weight", "c"], 30, sizes, parts)
    assert (size, names) == (30 + 5, ["b", "c"])
    assert found == [parts[0][1], parts[1][1]]
    assert get_module_size_with_ties([], 30, sizes, parts) == (30, [], [])


def test_ties_that_are_nowhere_or_on_different_devices_are_told(caplog):
    with pytest.raises(ConfigError, match=r"head\.weight"):
        get_module_size_with_ties(["head.weight"], 1, {"head.weight": 1}, [("he", None)])
    device_map = {"embed": 0, "decoder": 1, "decoder.first": 0}
    check_tied_parameters_on_same_device([["embed.weight", "decoder.first.weight"]], device_map)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nbaccel"):
        check_tied_parameters_on_same_device([["embed.weight", "decoder.last.weight"]], device_map)
    assert "'decoder.last.weight': 1" in caplog.text
    with pytest.raises(ConfigError, match=r"head\.weight"):
        check_tied_parameters_on_same_device([["head.weight"]], {"embed": 0})
