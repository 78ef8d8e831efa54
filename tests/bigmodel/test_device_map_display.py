"""A device map as text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.device_map import show_device_map
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Gpu, Inventory

KIB = 1024
MACHINE = Inventory(
    cpu_cores=4,
    host_total_bytes=100 * KIB,
    host_available_bytes=32 * KIB,
    gpus=(
        Gpu(index=0, name="Fast <GPU> & Co", free_bytes=8 * KIB, total_bytes=16 * KIB),
        Gpu(index=1, name="Slow", free_bytes=4 * KIB, total_bytes=4 * KIB),
    ),
    torch_version="2.13.0+cu130",
)
DEVICE_MAP = {
    "embed": 0,
    **{f"layers.{n}": 0 for n in range(2)},
    **{f"layers.{n}": torch.device("cuda", 1) for n in range(2, 5)},
    **{f"layers.{n}": "cpu" for n in range(5, 11)},
    "layers.11": "disk",
    "head": "cpu",
}


class Layered(nn.Module):
    """1 KiB in each layer, 2 KiB in the embedding, 1 KiB in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(12))
        self.head = nn.Linear(16, 16, bias=False)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Layered()


def shown(max_memory=None, device_map=DEVICE_MAP, model=None):
    return show_device_map(model or on_meta(), max_memory, inventory=MACHINE, device_map=device_map)


def test_a_map_is_shown_as_bars_and_a_table():
    lines = str(shown()).splitlines()
    assert lines[0] == "Layered: 15.0 KiB, 14 blocks on 4 devices"
    bars = [line.partition("[")[2].partition("]")[0] for line in lines[1:5]]
    assert bars[0] == "█" * 10 + "▓" * 10 + "·" * 20
    assert bars[1] == "█" * 30 + "·" * 10
    assert all(len(bar) == 40 for bar in bars)
    assert {line.index("[") for line in lines[1:5]} == {lines[1].index("[")}
    left = ["4.0 KiB left", "1.0 KiB left", "25.0 KiB left", "no limit known"]
    for line, held, rest in zip(lines[1:5], ("4.0", "3.0", "7.0", "1.0"), left, strict=True):
        assert f"holds {held} KiB" in line
        assert line.endswith(rest)
    assert "holds 3.0 KiB of 4.0 KiB" in lines[2]
    rows = [line.rsplit(maxsplit=2) for line in lines[7:]]
    assert [(row[0].split()[0], row[1]) for row in rows] == [
        ("embed", "2.0"),
        ("layers.0-1", "2.0"),
        ("layers.2-4", "3.0"),
        ("layers.5-10", "6.0"),
        ("layers.11", "1.0"),
        ("head", "1.0"),
    ]


def test_a_budget_is_the_capacity_and_too_much_is_marked():
    lines = str(shown({0: "5KiB", "cpu": "10KiB", "disk": "2KiB"})).splitlines()
    rests = ["1.0 KiB left", "no limit known", "3.0 KiB left", "1.0 KiB left"]
    assert all(line.endswith(rest) for line, rest in zip(lines[1:5], rests, strict=True))
    assert "✗ 3.0 KiB too much" in str(shown({0: "1KiB", 1: "4KiB"}))
    assert "✗" not in str(shown())


def test_the_models_own_map_is_read_and_what_is_inside_counts_once():
    model = on_meta()
    model.hf_device_map = {"": "cuda:1"}
    lines = str(show_device_map(model, inventory=MACHINE)).splitlines()
    assert lines[-1].split() == ["(the", "whole", "model)", "1", "·", "Slow", "15.0", "KiB"]
    assert "holds 0 B" in lines[1]
    lines = str(shown(device_map={"": "cpu", "layers.3": 0, "head.weight": 1})).splitlines()
    assert [line.split()[-2] for line in lines[-3:]] == ["13.0", "1.0", "1.0"]


@pytest.mark.parametrize("hf_device_map", [None, {}, 3])
def test_without_a_map_it_says_how_to_get_one(hf_device_map):
    model = on_meta()
    if hf_device_map is not None:
        model.hf_device_map = hf_device_map
    with pytest.raises(ConfigError, match=r"infer_auto_device_map\(model\)") as caught:
        show_device_map(model, inventory=MACHINE)
    assert str(hf_device_map) in str(caught.value)
