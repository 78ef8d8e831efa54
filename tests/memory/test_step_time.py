"""Estimated times of a step: what decides about them, and which way round they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from nbaccel.memory.operations import forward_operations
from nbaccel.memory.step_time import StepWork, Traffic, estimate_step, processor_speed
from nbaccel.plan import Inventory
from tests.notebook.machines import WITHOUT_GPU, with_gpus

WORK = StepWork(
    forward_flops=1e14,
    recomputes=False,
    passes=1,
    trained=10**9,
    total=10**9,
    value_bytes=2,
    precision="bf16",
)
NOWHERE = Traffic()
SHARDED = Traffic(shards_parameters=True)
ON_HOST = Traffic(optimizer_place="cpu")
ON_DISK = Traffic(shards_parameters=True, optimizer_place="nvme", parameter_place="nvme")


def seconds(work: StepWork = WORK, traffic: Traffic = NOWHERE, count: int = 2) -> float:
    time = estimate_step(work, traffic, with_gpus(count), num_processes=count)
    assert time is not None
    return time.total


def test_a_card_computes_at_a_share_of_its_data_sheet():
    # 3e14 operations at 0.4 of 989e12 a second.
    assert seconds(count=1) == pytest.approx(3e14 / (0.4 * 989e12))
    assert seconds(replace(WORK, precision="no", value_bytes=4)) > 10 * seconds()
    assert seconds(replace(WORK, precision="fp8")) < seconds()
    unknown = replace(with_gpus(1), gpus=(replace(with_gpus(1).gpus[0], name="Some card"),))
    assert estimate_step(WORK, NOWHERE, unknown, num_processes=1) is None


def test_a_precision_that_is_only_imitated_saves_no_time():
    def computing(precision: str, machine: Inventory) -> float:
        work = replace(WORK, precision=precision)
        time = estimate_step(work, NOWHERE, machine, num_processes=1)
        assert time is not None
        return time.computing

    turing, ampere = (with_gpus(1, capability=capability) for capability in ((7, 5), (8, 0)))
    assert computing("bf16", turing) == computing("no", turing) > computing("fp16", turing)
    assert computing("fp8", turing) == computing("bf16", turing)
    assert computing("fp8", ampere) == computing("bf16", ampere) < computing("no", ampere)
    assert computing("fp8", WITHOUT_GPU) > computing("no", WITHOUT_GPU)


def test_what_is_sent_and_what_waits_for_the_host_add_to_it():
    assert seconds(replace(WORK, recomputes=True)) == pytest.approx(4 / 3 * seconds())
    assert seconds(traffic=NOWHERE) < seconds(traffic=ON_HOST) < seconds(traffic=ON_DISK)
    short = replace(WORK, forward_flops=1e9)
    # ZeRO, section 7: half as much again where parameters are gathered, too.
    assert seconds(short, SHARDED) == pytest.approx(1.5 * seconds(short))
    assert seconds(short, count=1) < seconds(short), "one process exchanges nothing"


def test_processes_share_the_cores():
    one, two = (estimate_step(WORK, NOWHERE, WITHOUT_GPU, num_processes=count) for count in (1, 2))
    assert two.computing == pytest.approx(2 * one.computing)
    assert processor_speed(4) == pytest.approx(4 * processor_speed(1))
    assert processor_speed(1) > 1e9


def test_operations_are_counted_on_a_copy_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 4, bias=False))
    assert forward_operations(model, torch.zeros(16, 8192)) == 2 * 16 * (8192 * 8192 + 8192 * 4)


def test_a_model_that_needs_values_is_counted_by_its_parameters():
    class Picky(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) if values.sum().item() > 0 else values

    assert forward_operations(Picky(4, 4, bias=False), torch.ones(3, 4)) == 2 * 16 * 3
