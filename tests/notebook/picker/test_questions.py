"""The form describes the model and the machine as they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from nbaccel.config import RunConfig
from nbaccel.notebook.picker.availability import describe_batch, describe_model, machine_parts
from nbaccel.plan import resolve
from tests.notebook.machines import V5E_8, WITHOUT_GPU, with_gpus


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_a_model_is_counted_with_tied_weights_once():
    found = describe_model(Tied().to(torch.bfloat16))
    for fact in ("88 parameters in 4 tensors", "3 Linear", "bfloat16", "1 tied weight"):
        assert fact in found.facts


def test_a_model_on_meta_and_of_two_formats_says_so():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**4, 10**4), nn.Linear(2, 2).half())
    found = describe_model(model)
    assert found.facts.startswith("100 M parameters")
    assert found.facts.endswith("float32, float16 · on meta: shapes only")


def test_a_batch_is_described_by_its_shapes():
    assert describe_batch(torch.zeros(8, 20)) == "(8, 20)"
    nested = {"input_ids": torch.zeros(1, 5), "more": [torch.zeros(2), 7]}
    assert describe_batch(nested) == "input_ids (1, 5), more (2,)"
    assert describe_batch(None) == ""


def test_devices_that_are_used_are_marked():
    machine = with_gpus(3)
    parts = machine_parts(machine, resolve(RunConfig(num_processes=2), machine))
    assert [part.is_used for part in parts] == [True, True, False, False, False]
    assert parts[0].label == "GPU 0 · NVIDIA H100 · 80.0 GiB, 78.0 free"
    assert parts[-2].label == "host memory · 256.0 GiB, 200.0 free"
    assert parts[-1].label == "32 cores"


def test_many_equal_devices_are_one_part():
    machine = with_gpus(8)
    parts = machine_parts(machine, resolve(RunConfig(), machine))
    assert parts[0].label.startswith("GPU 0 to 7 · ")
    assert len(parts) == 3
    parts = machine_parts(V5E_8, resolve(RunConfig(), V5E_8))
    assert "0 to 7" in parts[0].label


def test_without_a_device_the_host_computes():
    parts = machine_parts(WITHOUT_GPU, resolve(RunConfig(), WITHOUT_GPU))
    assert [part.is_used for part in parts] == [True, True]
    assert machine_parts(replace(WITHOUT_GPU, cpu_cores=1), None)[-1].label == "1 core"
