from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nbaccel import debug_launcher
from nbaccel.strategies.optimizer_shards import numbered_parameters, place_like
from tests.strategies.workers import place


def placed() -> list[tuple[str, list[int], list[int], float]]:
    """How tensors of process 0 arrive beside a sharded parameter and beside a plain one."""
    here = place()
    mesh = init_device_mesh("cpu", (here.world_size,))
    parameter = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    found = []
    for like, shape in ((parameter, (5, 2)), (parameter, (5, 1)), (torch.zeros(2), (3,))):
        value = torch.full(shape, 7.0 if here.is_main else float("nan"))
        arrived = place_like(value, like)
        local = arrived.to_local() if isinstance(arrived, DTensor) else arrived
        kind = str(arrived.placements[0]) if isinstance(arrived, DTensor) else "plain"
        found.append((kind, list(arrived.shape), list(local.shape), local.mean().item()))
    return found


def test_state_is_cut_like_its_parameter_and_anything_else_is_whole_everywhere():
    shard, whole = str(Shard(0)), str(Replicate())
    assert debug_launcher(placed) == [
        [(shard, [5, 2], [rows, 2], 7.0), (whole, [5, 1], [5, 1], 7.0), ("plain", [3], [3], 7.0)]
        for rows in (3, 2)
    ]


def test_parameters_are_numbered_through_all_groups():
    first, second, third = (nn.Parameter(torch.zeros(n)) for n in (1, 2, 3))
    optimizer = torch.optim.SGD([{"params": [second]}, {"params": [first, third]}], lr=0.1)
    numbered = numbered_parameters(optimizer)
    assert [tensor.numel() for tensor in numbered] == [2, 1, 3]
