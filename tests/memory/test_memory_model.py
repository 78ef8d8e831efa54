"""Estimates of states, against the bytes that training really holds: levels of FP8, FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, FullyShardedDataParallelPlugin, debug_launcher
from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.memory.estimate import measure
from nbaccel.memory.memory_model import fsdp_estimate, model_states, short_formats, wrapped_sizes
from nbaccel.plan import Inventory
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.utils import FP8RecipeKwargs
from tests import needs
from tests.notebook.machines import WITHOUT_GPU


class Net(nn.Module):
    """Linear layers, a norm, a head that is tied to the embedding, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(8)), nn.LayerNorm(128)
        )
        self.frozen = nn.Linear(128, 128)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(128, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(self.embedding(tokens))))


def stored(tensor: Any) -> int:
    return tensor.stored_bytes if isinstance(tensor, ScaledTensor) else tensor.nbytes


def held_bytes(model: nn.Module, fp8: dict[str, Any] | None, steps: int = 1) -> tuple[int, ...]:
    """Train a step; parameters, gradients and Adam's moments and masters, in bytes."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": steps}
    if fp8 is not None:
        settings |= {"mixed_precision": "fp8", "kwargs_handlers": [FP8RecipeKwargs(**fp8)]}
    accelerator = Accelerator(cpu=True, **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    parallel, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(parallel):
        loss = parallel(torch.arange(64).view(4, 16)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    parameters = list(parallel.parameters())
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return tuple(sum(map(stored, tensors)) for tensors in (parameters, gradients, states))


def states_of(estimated: Any) -> tuple[float, ...]:
    return estimated.parameters, estimated.gradients, estimated.optimizer


def run_config(fp8: dict[str, Any] | None, **settings: Any) -> RunConfig:
    return RunConfig(mixed_precision="no" if fp8 is None else "fp8", fp8=fp8, **settings)


MSAMP = {"backend": "msamp"}
IN_ONE = (
    None,
    {"backend": "native"},
    {**MSAMP, "opt_level": "O1"},
    {**MSAMP, "opt_level": "O2"},
    {**MSAMP, "opt_level": "O2", "skip_first_and_last": True},
)


@pytest.mark.parametrize("fp8", IN_ONE, ids=str)
def test_one_process_holds_what_is_estimated(fp8):
    estimated = model_states(Net(), formats=short_formats(run_config(fp8)))
    assert states_of(estimated) == pytest.approx(held_bytes(Net(), fp8), rel=0.02)
    assert estimated.buckets == 0


@pytest.mark.parametrize(("level", "bytes_per_parameter"), [("O1", 11), ("O2", 6)])
def test_large_models_take_the_bytes_of_the_level_and_no_buckets(level, bytes_per_parameter):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    count = sum(parameter.numel() for parameter in model.parameters())
    formats = short_formats(run_config({**MSAMP, "opt_level": level}))
    states = model_states(model, world_size=4, formats=formats)
    assert states.model_states == bytes_per_parameter * count
    assert states.buckets == 0


def test_many_accumulated_gradients_are_kept_in_16_bits():
    fp8 = {**MSAMP, "opt_level": "O2"}
    few, many = (
        model_states(
            Net(), formats=short_formats(run_config(fp8, gradient_accumulation_steps=steps))
        )
        for steps in (8, 9)
    )
    assert many.gradients - few.gradients == 8 * 128 * 128
    assert many.gradients == pytest.approx(held_bytes(Net(), fp8, steps=9)[1], rel=0.02)


@needs.DEEPSPEED_ROW
def test_estimate_memory_reads_the_level_of_a_run():
    from nbaccel import estimate_memory

    run = run_config({**MSAMP, "opt_level": "O2"})
    found = estimate_memory(Net(), run=run, num_processes=2, inventory=WITHOUT_GPU)
    assert "MS-AMP's O2" in str(found)
    assert found.device == model_states(Net(), world_size=2, formats=short_formats(run))
    with pytest.raises(ConfigError, match=r"linear layers.*\(100, 10\).*Give the module"):
        estimate_memory((100, 10), run=run, inventory=WITHOUT_GPU)


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


def estimated(*, compute_bytes: int, offloads: bool) -> Any:
    model = network()
    return fsdp_estimate(
        measure(model),
        wrapped_sizes(model, POLICY),
        compute_bytes=compute_bytes,
        offloads=offloads,
        num_processes=2,
        num_nodes=1,
        activation_bytes=0,
        inventory=MACHINE,
    )


def test_each_process_holds_its_part_of_everything():
    sizes = wrapped_sizes(network(), POLICY)
    of_device = estimated(compute_bytes=4, offloads=False).device
    for held in debug_launcher(train_a_step, num_processes=2):
        assert held == states_of(of_device)
    assert sizes.largest_layer == 128 * 128 + 128
    assert sizes.root == 4 * 128 + 4
    assert of_device.buckets == 4 * sizes.root, "the root stays whole until its backward pass"

    # Offloaded shards are in host memory.
    kept, left = (estimated(compute_bytes=2, offloads=offloads) for offloads in (False, True))
    assert left.device.model_states == 0
    assert left.host.model_states == 2 * kept.device.model_states
