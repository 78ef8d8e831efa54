"""FSDP's estimate beside what two processes hold in a real step."""

from __future__ import annotations

import torch
from torch import nn

from nbaccel import Accelerator, FullyShardedDataParallelPlugin, debug_launcher
from nbaccel.memory.estimate import measure
from nbaccel.memory.memory_model import fsdp_estimate, wrapped_sizes
from nbaccel.plan import Inventory

MACHINE = Inventory(cpu_cores=2, host_total_bytes=2**34, host_available_bytes=2**33)
POLICY = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)


def network() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(128, 4))


def train_a_step() -> tuple[int, int, int]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**POLICY))
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.randn(4, 128)).sum())
    gradients = sum(p.grad.to_local().nbytes for p in model.parameters())
    optimizer.step()
    states = sum(
        value.to_local().nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "to_local")
    )
    parameters = sum(p.to_local().nbytes for p in model.parameters())
    accelerator.end_training()
    return parameters, gradients, states


def test_each_process_holds_its_part_of_everything():
    model = network()
    sizes = wrapped_sizes(model, POLICY)
    estimate = fsdp_estimate(
        measure(model),
        sizes,
        compute_bytes=4,
        offloads=False,
        num_processes=2,
        num_nodes=1,
        activation_bytes=0,
        inventory=MACHINE,
    )
    of_device = estimate.device
    for held in debug_launcher(train_a_step, num_processes=2):
        assert held == (of_device.parameters, of_device.gradients, of_device.optimizer)
    assert sizes.largest_layer == 128 * 128 + 128
    assert sizes.root == 4 * 128 + 4
    assert of_device.buckets == 4 * sizes.root, "the root stays whole until its backward pass"


def test_offloaded_shards_are_in_host_memory():
    model = network()
    arguments = {
        "compute_bytes": 2,
        "num_processes": 2,
        "num_nodes": 1,
        "activation_bytes": 0,
        "inventory": MACHINE,
    }
    sizes = wrapped_sizes(model, POLICY)
    kept = fsdp_estimate(measure(model), sizes, offloads=False, **arguments)
    left = fsdp_estimate(measure(model), sizes, offloads=True, **arguments)
    assert left.device.model_states == 0
    assert left.host.model_states == 2 * kept.device.model_states
