"""A device map as text and as HTML."""

from __future__ import annotations

import html

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.device_map_display import show_device_map
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


def test_a_map_is_shown_as_runs_bars_text_and_html():
    assert [(run.label, run.device, run.size, run.num_blocks) for run in shown().runs] == [
        ("embed", 0, 2 * KIB, 1),
        ("layers.0-1", 0, 2 * KIB, 2),
        ("layers.2-4", 1, 3 * KIB, 3),
        ("layers.5-10", "cpu", 6 * KIB, 6),
        ("layers.11", "disk", KIB, 1),
        ("head", "cpu", KIB, 1),
    ]
    bars = shown().bars
    assert [(bar.device, bar.capacity, bar.used, bar.left) for bar in bars] == [
        (0, 8 * KIB, 4 * KIB, 4 * KIB),
        (1, 4 * KIB, 3 * KIB, KIB),
        ("cpu", 32 * KIB, 7 * KIB, 25 * KIB),
        ("disk", None, KIB, None),
    ]
    lines = str(shown()).splitlines()
    assert lines[0] == "Layered: 15.0 KiB, 14 blocks on 4 devices"
    bars = [line.partition("[")[2].partition("]")[0] for line in lines[1:5]]
    assert bars[0] == "█" * 10 + "▓" * 10 + "·" * 20
    assert bars[1] == "█" * 30 + "·" * 10
    assert all(len(bar) == 40 for bar in bars)
    assert {line.index("[") for line in lines[1:5]} == {lines[1].index("[")}
    assert "holds 3.0 KiB of 4.0 KiB" in lines[2]
    assert "1.0 KiB left" in lines[2]
    assert lines[-3].split() == ["layers.5-10", "cpu", "6.0", "KiB"]
    assert repr(shown()) == str(shown())
    page = shown()._repr_html_()
    assert page.count("<tr") == 1 + 4 + 1 + 6
    assert "<GPU>" not in page
    assert "Fast &lt;GPU&gt; &amp; Co" in page
    for bar in shown().bars:
        assert all(html.escape(cell) in page for cell in bar.cells(shown().runs))


def test_a_budget_is_the_capacity_and_too_much_is_marked():
    bars = shown({0: "5KiB", "cpu": "10KiB", "disk": "2KiB"}).bars
    assert [(bar.device, bar.left) for bar in bars] == [
        (0, KIB),
        (1, None),
        ("cpu", 3 * KIB),
        ("disk", KIB),
    ]
    view = shown({0: "1KiB", 1: "4KiB"})
    for text in (str(view), view._repr_html_()):
        assert "✗ 3.0 KiB too much" in text
    assert "✗" not in shown()._repr_html_()


def test_the_models_own_map_is_read_and_what_is_inside_counts_once():
    model = on_meta()
    model.hf_device_map = {"": "cuda:1"}
    view = show_device_map(model, inventory=MACHINE)
    assert [(run.label, run.device, run.size) for run in view.runs] == [
        ("(the whole model)", 1, 15 * KIB)
    ]
    assert view.bars[0].used == 0
    view = shown(device_map={"": "cpu", "layers.3": 0, "head.weight": 1})
    sizes = {run.label: run.size for run in view.runs}
    assert sizes == {"(the whole model)": 13 * KIB, "layers.3": KIB, "head.weight": KIB}


@pytest.mark.parametrize("hf_device_map", [None, {}, 3])
def test_without_a_map_it_says_how_to_get_one(hf_device_map):
    model = on_meta()
    if hf_device_map is not None:
        model.hf_device_map = hf_device_map
    with pytest.raises(ConfigError, match=r"infer_auto_device_map\(model\)") as caught:
        show_device_map(model, inventory=MACHINE)
    assert str(hf_device_map) in str(caught.value)
