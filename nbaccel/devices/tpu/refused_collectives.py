"""Collectives of torch that refuse tensors of torch_xla, which gloo would leave as they are.

    dist.all_reduce ─────────────┐
    from … import all_reduce ────┼──► torch's operation c10d::allreduce_ ──► refused for ``xla``
    DistributedDataParallel, … ──┘

For this device nobody has written these operations, so torch_xla copies their tensors to the host,
runs them there and copies nothing back: they return at once, and every rank goes on with its own
values (torch_xla 2.9). Neither a process group of torch_xla's own comes by here, nor functional
collectives: torch_xla has written those, and they go from chip to chip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed  # defines the operations

from nbaccel.base.errors import ConfigError

_REDUCED = "accelerator.reduce(tensor)"
_GATHERED = "accelerator.gather(tensor)"
_BROADCAST = "nbaccel.utils.broadcast(tensor)"
# torch's operation → the function that users call, and what does the same on any device.
_COLLECTIVES: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", _REDUCED),
    "allreduce_coalesced_": ("all_reduce_coalesced", _REDUCED),
    "reduce_": ("reduce", _REDUCED),
    "broadcast_": ("broadcast", _BROADCAST),
    "allgather_": ("all_gather", _GATHERED),
    "_allgather_base_": ("all_gather_into_tensor", _GATHERED),
    "allgather_coalesced_": ("all_gather_coalesced", _GATHERED),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor", _GATHERED),
    "gather_": ("gather", _GATHERED),
    "reduce_scatter_": ("reduce_scatter", _REDUCED),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", _REDUCED),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", _REDUCED),
    "scatter_": ("scatter", _BROADCAST),
    "alltoall_": ("all_to_all", ""),
    "alltoall_base_": ("all_to_all_single", ""),
    "send": ("send", ""),
    "recv_": ("recv", ""),
    "recv_any_source_": ("recv", ""),
}
# What is registered goes with the object that has registered it.
_REGISTERED: list[Any] = []


def refuse_collectives() -> None:
    """Let this process's collectives of tensors on ``xla`` fail instead of changing nothing."""
    if _REGISTERED:
        return
    untyped: Any = torch.library.Library
    library = untyped("c10d", "IMPL", "XLA")
    _REGISTERED.append(library)
    for operation, (name, remedy) in _COLLECTIVES.items():
        if hasattr(torch.ops.c10d, operation):
            library.impl(operation, _refusal_of(name, remedy))


def _refusal_of(name: str, remedy: str) -> Callable[..., NoReturn]:
    text = f"Use {remedy}, or move it" if remedy else "Move it"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"torch.distributed.{name} got a tensor on xla, and this process group is "
            f"gloo's: it would return at once, and change nothing. {text} to the host: "
            "tensor.cpu()."
        )

    return refuse
