"""Optimizers whose parameters are cut into shards: their parameters, their state, and back.

[Note: one format] The whole state of a sharded optimizer is written as its own `state_dict` would
be without sharding, so any strategy and any number of processes can load it. torch's
`get_optimizer_state_dict` is not used for it: it names parameters instead of numbering them, and it
steps an optimizer that has no state yet, which leaves Adam one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel.base.errors import ConfigError


def follow_parameters(optimizer: Optimizer, became: WeakTensorKeyDictionary) -> None:
    """Point an optimizer at what its parameters have become; a collective where it has state."""
    for param_group in optimizer.param_groups:
        old_parameters = param_group["params"]
        param_group["params"] = [became.get(p, p) for p in old_parameters]  # type: ignore[no-untyped-call]
        # torch's foreach kernels take sharded tensors, or plain ones, never both in one list.
        is_mixed = len({isinstance(p, DTensor) for p in param_group["params"]}) > 1
        # None leaves the choice to torch; a choice of the user's is kept.
        if is_mixed and param_group.get("foreach", False) is None:
            param_group["foreach"] = False
    # A list, because the loop replaces keys of the dictionary.
    for old_parameter in [parameter for parameter in optimizer.state if parameter in became]:
        new_parameter = became[old_parameter]
        state = optimizer.state.pop(old_parameter)
        for name, value in state.items():
            # Such as Adam's step: the same on every process.
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if value.shape != old_parameter.shape:
                raise ConfigError(
                    f"The optimizer already holds {name!r} of shape {tuple(value.shape)} for a "
                    f"parameter of shape {tuple(old_parameter.shape)}: it is unknown which part of "
                    "it belongs to which shard. Call prepare before the first step, or load its "
                    "state after prepare."
                )
            state[name] = place_like(value, new_parameter)
        optimizer.state[new_parameter] = state


def place_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Give each process its part of a tensor; a collective."""
    if not isinstance(parameter, DTensor):
        # A copy, because the broadcast writes into it and the caller keeps the original.
        value = value.to(parameter.device, copy=True)
        if dist.is_initialized():
            dist.broadcast(value, 0)
        return value
    device_mesh = parameter.device_mesh
    placements = parameter.placements if value.shape == parameter.shape else [Replicate()]
    # On the mesh's device type, where its backend works: NCCL cannot send from host memory.
    on_device = value.detach().to(device_mesh.device_type)
    # Host memory is the parameter's device where shards are offloaded.
    return distribute_tensor(on_device, device_mesh, placements).to(parameter.device)


def refill_parameter(parameter: torch.Tensor, whole_tensor: torch.Tensor) -> None:
    """Give each process its part of process 0's values; a collective."""
    part = place_like(whole_tensor, parameter)
    if isinstance(parameter, DTensor) and isinstance(part, DTensor):
        # In place, because `fully_shard` keeps references to this storage.
        with torch.no_grad():
            parameter.to_local().copy_(part.to_local())


def numbered_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gather_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The whole state dict of an optimizer with sharded state; a collective."""

    def whole(number: Any, name: str, value: Any) -> Any:
        # A collective, so also on processes that drop the result.
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not keep or not isinstance(value, torch.Tensor):
            return value if keep else None
        # Always a copy: the next optimizer step would change a shared tensor.
        return value.detach().to("cpu", copy=True)

    whole_state = _map_state(optimizer.state_dict(), whole)
    return whole_state if keep else {}


def _map_state(
    optimizer_state: Mapping[str, Any], change: Callable[[Any, str, Any], Any]
) -> dict[str, Any]:
    changed = {
        number: {name: change(number, name, value) for name, value in parameter_state.items()}
        for number, parameter_state in optimizer_state["state"].items()
    }
    return {**optimizer_state, "state": changed}


def scatter_optimizer_state(
    optimizer: Optimizer, optimizer_state: Mapping[str, Any], *, source: bool
) -> None:
    """Load the whole state dict that process 0 has into an optimizer; a collective."""

    def outlined(number: Any, name: str, value: Any) -> Any:
        # A tensor on `meta` pickles as shape and dtype alone, which is all that the others need.
        return value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value

    outline_box: list[Any] = [_map_state(optimizer_state, outlined) if source else None]
    if dist.is_initialized():
        dist.broadcast_object_list(outline_box, 0)
    state_outline = outline_box[0]
    parameters = numbered_parameters(optimizer)
    num_saved = sum(len(group["params"]) for group in state_outline["param_groups"])
    # Compared with what process 0 sent, so all processes raise or none does.
    if num_saved != len(parameters):
        raise ConfigError(
            f"The saved optimizer has {num_saved} parameters and this one has {len(parameters)}: "
            "state would go to the wrong ones. Build the optimizer as when it was saved."
        )

    def placed(number: Any, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        empty = torch.empty(value.shape, dtype=value.dtype)
        whole = optimizer_state["state"][number][name] if source else empty
        return place_like(whole, parameters[number])

    optimizer.load_state_dict(_map_state(state_outline, placed))
