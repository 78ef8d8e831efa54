from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbaccel import Accelerator, DistributedDataParallelKwargs, notebook_launcher
from nbaccel.precision.fp8.gradient_exchange import ScaledGradients, two_shot_mean
from nbaccel.precision.fp8.linear import LayerRecipe, convert_layer
from nbaccel.precision.fp8.scaled_tensor import E4M3, FP16, ScaledTensor


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def in_workers() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    found: dict[str, Any] = {}
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    exact = accelerator.reduce(values.clone(), "mean")
    mean = two_shot_mean(values)
    found["error"] = error(mean, exact)
    found["bits"] = mean.view(torch.int32).sum().item()
    found["short"] = two_shot_mean(torch.full((3,), 2.0)).tolist()
    bad = values.clone()
    bad[5] = float("nan") if rank == size - 1 else 0.0
    found["nan"] = bool(two_shot_mean(bad)[5].isnan())
    found["own gradients"] = own_gradients(rank)
    return found


def own_gradients(rank: int) -> dict[str, Any]:
    """Of weights that DDP leaves alone: averaged where wanted, and not where not."""
    torch.manual_seed(rank)  # another start on each rank: they get that of rank 0
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    unused = nn.Linear(16, 16, bias=False)
    layers = [model[0], model[2], unused]
    for layer in layers:
        layer.weight = nn.Parameter(ScaledTensor.of(layer.weight.detach(), FP16))
        convert_layer(layer, LayerRecipe(emulate=True))
    is_synced = [True]
    weights: list[Any] = [layer.weight for layer in layers]
    averaging = ScaledGradients(weights, E4M3, lambda: is_synced[0])

    def backward() -> float:
        model(torch.randn(8, 32)).square().mean().backward()
        return float(weights[0].grad.dequantize().norm())

    found: dict[str, Any] = {"start": float(weights[0].detach().dequantize().sum())}
    is_synced[0] = False
    found["kept"] = backward()
    is_synced[0] = True
    found["averaged"] = backward()
    found["unused"] = unused.weight.grad
    averaging.detach()
    found["detached"] = backward()
    found["format"] = weights[0].grad.number_format.name
    return found


@pytest.mark.parametrize("num_processes", [2, 3])
def test_means_are_the_same_bits_on_all_processes(num_processes):
    results = notebook_launcher(in_workers, num_processes=num_processes)
    first = results[0]
    for other in results[1:]:
        assert other["bits"] == first["bits"]
    assert first["error"] < 0.045
    assert first["short"] == [2.0, 2.0, 2.0]
    assert all(result["nan"] for result in results)
    own = [result["own gradients"] for result in results]
    for name in ("start", "averaged"):
        assert len({result[name] for result in own}) == 1, name
    for name in ("kept", "detached"):
        assert len({result[name] for result in own}) == num_processes, name
    assert all(result["unused"] is None and result["format"] == "E4M3" for result in own)


def with_hook(hook: str) -> tuple[list[float], float]:
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)]
    )
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    losses = []
    for _ in range(200):
        inputs = torch.randn(16, 16)
        loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, float(weights.double().sum())


def test_ddp_sends_gradients_of_8_bits_and_replicas_stay_equal():
    plain = notebook_launcher(with_hook, ("no",), num_processes=2)
    short = notebook_launcher(with_hook, ("fp8",), num_processes=2)
    assert short[0][1] == short[1][1]  # after 200 steps
    assert short[0][1] != plain[0][1]
    assert sum(short[0][0][-20:]) < 1.2 * sum(plain[0][0][-20:]) < 0.3 * sum(plain[0][0][:20])
    assert dist.is_available()
