"""The estimate by configuration: what is counted, where it goes, how it is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import advise
from nbaccel.config import RunConfig
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.deepspeed.zero_memory import check_disk, estimate_memory
from nbaccel.errors import ConfigError
from nbaccel.memory.estimate import measure
from nbaccel.plan.inventory import Inventory
from nbaccel.strategies.model_blocks import checkpoints_gradients
from tests.deepspeed.advisor.models import machine

FULL = 12 << 20


def check_room(model: nn.Module, config: ZeroConfig, num_processes: int) -> None:
    check_disk(estimate_memory(model, config, num_processes=num_processes))


def swapped_to(folder: Path | str) -> dict[str, object]:
    part = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": part}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_room_is_told_with_both_numbers(small_disk):
    model = nn.Linear(1024, 1024)  # 12 MiB of weights and states in float32, and gradients
    settings = swapped_to(small_disk / "swap")
    with pytest.raises(ConfigError, match=r"has too little room: .*\(\d+ bytes\).*2 process") as e:
        check_room(model, ZeroConfig.from_dict(settings), 2)
    assert str(small_disk / "swap") in str(e.value)
    settings["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    check_room(model, ZeroConfig.from_dict(settings), 2)

    # What an earlier run left is overwritten, and counts as room.
    old = small_disk / "zero_stage_3" / "optimizer" / "rank0"
    old.mkdir(parents=True)
    (old / "1.tensor.swp").write_bytes(bytes(8 << 20))
    model = nn.Linear(512, 512)  # 4 MiB, with gradients
    config = ZeroConfig.from_dict(swapped_to(small_disk))

    check_room(model, config, 1)
    (old / "1.tensor.swp").rename(small_disk / "of somebody else")
    with pytest.raises(ConfigError, match="too little room"):
        check_room(model, config, 1)


GIB = 2**30
HOST = Inventory(cpu_cores=8, host_total_bytes=64 * GIB, host_available_bytes=32 * GIB)
SHAPE = (1_000_000, 100_000)


def gpus(number, free=16 * GIB):
    return replace(HOST, gpus=machine(number, free_bytes=free).gpus)


def zero(stage, *, optimizer="none", param="none", bf16=True, **more):
    return {
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": optimizer},
            "offload_param": {"device": param},
            **more,
        },
    }


def estimate(config=None, shape=SHAPE, inventory=HOST, **more):
    return estimate_memory(shape, config, inventory=inventory, **more)


class Tied(nn.Module):
    def __init__(self, width=16, rows=50):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight


# ---------------------------------------------------------------- counting
def test_parameters_are_counted_once_as_what_they_stand_for():
    shape = measure(Tied())
    assert (shape.total, shape.largest_layer) == (800, 800)
    # DeepSpeed's own count is by address, and all tensors on meta have the same.
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    shape = measure(model)
    assert shape.total == sum(p.numel() for p in model.parameters()) == 830
    assert shape.largest_layer == 620
    model = nn.Linear(3, 5)
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert measure(model).total == 20
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    model[0].requires_grad_(False)
    found = estimate(shape=model).device
    assert found.parameters == 4 * (10_100 + 101)
    assert (found.gradients, found.optimizer) == (4 * 101, 8 * 101)


# ---------------------------------------------------------------- where it goes
ALL_ON_DISK = zero(3, optimizer="nvme", param="nvme")
ADAM = {"optimizer": {"type": "AdamW"}}
TORCHS = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
GPU = {"inventory": gpus(1)}
SMALL = {"reduce_bucket_size": 1000}
OWN = {"zero_force_ds_cpu_optimizer": False}


@pytest.mark.parametrize(
    ("config", "more", "where", "expected"),
    [
        (None, {}, "device.model_states", 16_000_000),
        (None, {}, "host.total", 0),
        (ALL_ON_DISK, {}, "nvme.parameters", 2_000_000),
        (ALL_ON_DISK, {}, "nvme.optimizer", 12_000_000),
        (ALL_ON_DISK, {}, "nvme.gradients", 4_000_000),  # in the optimizer's format
        (ALL_ON_DISK, {}, "host.buckets", 2 * 5 * 10**8 + 4 * 4 * 10**6),  # room to read them
        (zero(2, optimizer="nvme"), {}, "nvme.total", 0),  # DeepSpeed takes it as cpu
        (zero(2, optimizer="nvme"), {}, "host.optimizer", 12_000_000),
        (zero(2, param="cpu"), {}, "host.total", 0),  # ignored below stage 3
        (ADAM, {}, "device.optimizer", 8_000_000),
        ({"optimizer": {"type": "Lion"}}, {}, "device.optimizer", 4_000_000),
        ({"optimizer": {"type": "SGD"}}, {}, "device.optimizer", 0),
        (zero(2, **SMALL, overlap_comm=False), GPU, "device.buckets", 2_000),
        (zero(2, **SMALL, overlap_comm=True), GPU, "device.buckets", 4_000),
        # DeepSpeed reserves 5e8 numbers, which take no memory on a CPU until they are written.
        (zero(2), GPU, "device.buckets", 10**9),
        (zero(2), {}, "device.buckets", 0),
        (zero(2, **SMALL), {}, "device.in_backward", 2000),
        # Torch's own optimizers hold copies of the updated part, two on CPUs and one on GPUs;
        # flat gradients come before.
        *(({**zero(2), **own}, {}, "device.in_step", 8 * 10**6) for own in ({}, TORCHS)),
        *(({**zero(2), **own}, GPU, "device.in_step", 4 * 10**6) for own in ({}, TORCHS)),
        *(({**zero(2), **ADAM}, more, "device.in_step", 4 * 10**6) for more in ({}, GPU)),
        ({**zero(2, optimizer="cpu"), **OWN}, {}, "host.in_step", 8 * 10**6),
        (zero(2, optimizer="cpu"), {}, "host.in_step", 0),  # it is made into DeepSpeed's
        # In 16 bit without ZeRO gradients are there three times then: 6 bytes beside 18.
        ({**zero(0), **ADAM}, {}, "device.peak", 24_000_000),
        ({**zero(0), **ADAM}, {"activation_bytes": 5_000_000}, "device.peak", 24_000_000),
        ({**zero(0), **ADAM}, {"activation_bytes": 7_000_000}, "device.peak", 25_000_000),
    ],
)
def test_what_is_where(config, more, where, expected):
    assert attrgetter(where)(estimate(config, num_processes=1, **more)) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_processes_need_less_each(stage):
    alone, among_four = (estimate(zero(stage), num_processes=n).device for n in (1, 4))
    assert among_four.optimizer * 4 == alone.optimizer == 12_000_000
    assert (among_four.parameters < alone.parameters) == (stage == 3)


def test_hosts_divide_the_work_and_what_is_offloaded_moves():
    config = zero(3, optimizer="cpu")
    alone, among_four = (estimate(config, num_nodes=n).host for n in (1, 4))
    assert among_four.total * 4 == alone.total
    stays, moves = estimate(zero(3)), estimate(zero(3, optimizer="cpu", param="cpu"))
    assert stays.host.model_states == 0
    assert moves.device.model_states == 0
    assert moves.host.model_states == stays.device.model_states


# ---------------------------------------------------------------- how it is told
def test_it_is_compared_with_what_is_free_on_each_device_or_on_the_host_that_they_share():
    config = zero(0)
    model = (2 * 10**9, 10**6)
    assert not estimate(config, model, gpus(2, free=24 * GIB), num_processes=2).fits
    assert estimate(config, model, gpus(2, free=46 * GIB), num_processes=2).fits
    found = estimate(config, model, gpus(2, free=24 * GIB), num_processes=2)
    assert found.device_free == 24 * GIB - 1, "the fuller of the two"
    assert "does not fit: 20.7 GiB per device too little" in str(found)
    shape = (8 * 10**8, 10**6)
    found = estimate(shape=shape, num_processes=2)
    assert found.host_needed == 2 * (16 * 8 * 10**8 + 4 * 5 * 10**8), "reduced 5e8 at once"
    assert found.fits
    assert not estimate(shape=shape, num_processes=3).fits


def test_the_table_has_a_line_for_each_kind_of_content_and_says_what_is_not_in_it():
    text = str(estimate(zero(2, optimizer="cpu"), num_processes=2))
    words = [line.split()[0] for line in text.splitlines()[2:10]]
    assert words == [
        *("parameters", "gradients", "optimizer", "buckets", "activations", "total", "peak"),
        "free",
    ]
    assert text.startswith(
        "1,000,000 parameters, ZeRO-2, bf16, optimizer on cpu, 1 host of 2 processes\n"
    )
    found = estimate(zero(3))
    shown = found._repr_mimebundle_()
    html = shown.pop("text/html")
    assert shown == {"text/plain": str(found)}
    assert repr(found).startswith("<MemoryEstimate: ")
    assert len(repr(found)) < 200
    assert html.count("<tr>") == 9
    assert "ZeRO-3" in html
    assert "Activations are not in it" in str(estimate())
    found = estimate(activation_bytes=5 * GIB)
    assert found.device.activations == 5 * GIB
    assert "Activations are not" not in str(found)
    assert "the system may count a third more" in str(estimate())
    assert "the system counts" not in str(estimate(inventory=gpus(1)))
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    assert "zero_optimization.reduce_bucket_size" in str(estimate(config))


def test_what_is_lacking_is_told_by_place(tmp_path):
    """More than any disk has, and more than this host; the folder need not be there yet."""
    config = zero(3, optimizer="nvme", param="cpu")
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "new" / "swap")
    found = estimate(config, (10**15, 10**9))
    assert found.nvme_free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert found.lacking.keys() == {"host", "nvme"}
    assert found.lacking["nvme"] == found.nvme.peak - found.nvme_free
    assert re.search(r"does not fit: .* of host memory and .* of disk too little", str(found))
    assert not (tmp_path / "new").exists()


def test_auto_is_decided_by_the_run_and_the_model(llama):
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}}
    found = estimate(config, run=RunConfig(mixed_precision="bf16", zero_stage=3))
    assert found.strategy == "ZeRO-3, bf16"
    with pytest.raises(ConfigError, match=r"stage is 2 in the file and 3 by the run"):
        estimate(zero(2), run=RunConfig(zero_stage=3))
    open_sizes = {"stage": 2, "reduce_bucket_size": "auto"}
    config = {"zero_optimization": open_sizes, "train_batch_size": "auto"}
    found = estimate_memory(llama, config)
    assert "auto" not in str(found)
    open_sizes["reduce_bucket_size"] = 64 * 64
    assert found == estimate_memory(llama, config)


# ---------------------------------------------------------------- what it is given


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimate("nowhere.json"), r"'nowhere\.json'.*Give the path of a JSON file"),
        (lambda: estimate(zero(4)), r"stage must be one of 0, 1, 2, 3: got 4"),
        (lambda: estimate(zero(3, optimizer="disk")), r"device must be.*got 'disk'.*nvme"),
        (lambda: estimate(shape=7), r"from 7: its size is unknown.*Give the module"),
        (lambda: estimate(shape=(5, 6)), r"5 parameters cannot have a largest layer of 6"),
        (lambda: estimate(num_processes=0), r"num_processes=0.*Use 1 or more"),
    ],
)
def test_a_mistake_says_what_to_give(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize("estimate", [estimate_memory, advise])
def test_a_class_and_a_model_without_shapes_have_no_size(estimate: Any) -> None:
    with pytest.raises(ConfigError, match=r"model=Linear is a class.*Give an object"):
        estimate(nn.Linear)
    with pytest.raises(ConfigError, match=r"without a shape \(weight, bias\).*Call it once"):
        estimate(nn.LazyLinear(3))


# ---------------------------------------------------------------- with a batch
@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.fixture
def tokens():
    ids = torch.zeros(2, 32, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def test_a_model_of_transformers_on_meta_is_measured_with_a_batch(llama, tokens):
    plain, again = (
        estimate_memory(llama, sample_batch=tokens, gradient_checkpointing=on).device.activations
        for on in (False, True)
    )
    assert 0 < again < plain / 2
    assert not checkpoints_gradients(llama)
    assert all(p.is_meta for p in llama.parameters())
    two, eight = (
        estimate_memory(
            llama, {"train_micro_batch_size_per_gpu": rows}, sample_batch=tokens
        ).device.activations
        for rows in (2, 8)
    )
    assert eight == pytest.approx(4 * two, rel=0.1)
    with pytest.raises(ConfigError, match=r"(?s)sample_batch needs the model.*both given"):
        estimate_memory((100, 10), sample_batch=tokens, activation_bytes=5)
