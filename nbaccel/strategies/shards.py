"""What becomes of an optimizer when its parameters are cut into shards, and back.

[Note: one format] The whole state of a sharded optimizer is written as its own `state_dict` would
be without sharding, so any strategy and any number of processes can load it. torch's
`get_optimizer_state_dict` is not used for it: it names parameters instead of numbering them, and it
steps an optimizer that has no state yet, which leaves Adam one step ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel.errors import ConfigError

__all__ = ["follow", "gather", "numbered_parameters", "place_like", "refill", "scatter"]


def follow(optimizer: Optimizer, became: WeakTensorKeyDictionary) -> None:
    """Point an optimizer at the shards that its parameters have become.

    State it already has is cut like its parameters; that is a collective, and the state of
    process 0 counts.

    Args:
        optimizer: Built over parameters as they were; changed in place.
        became: New parameter by old one.

    Raises:
        ConfigError: Some of its state cannot be cut.
    """
    for group in optimizer.param_groups:
        group["params"] = [_new(old, became) for old in group["params"]]
        _one_kernel_for_all(group)
    for old in [old for old in optimizer.state if old in became]:
        new = became[old]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            name: _cut(name, value, old, new) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def _new(old: torch.Tensor, became: WeakTensorKeyDictionary) -> torch.Tensor:
    new: torch.Tensor = became[old] if old in became else old  # noqa: SIM401 - `get` has no types
    return new


def _one_kernel_for_all(group: dict[str, Any]) -> None:
    # torch's foreach kernels take sharded tensors, or plain ones, never both in one list.
    kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None:
        group["foreach"] = False


def _cut(name: str, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if value.dim() == 0:
        return value
    if value.shape != old.shape:
        raise ConfigError(
            f"The optimizer already holds {name!r} of shape {tuple(value.shape)} for a parameter "
            f"of shape {tuple(old.shape)}: nobody can tell which part of it belongs to which "
            "shard. Call prepare before the first step, or load its state after prepare."
        )
    return place_like(value, new)


def place_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Give each process its part of a tensor; a collective.

    Args:
        value: The whole; what process 0 has counts, elsewhere only shape and dtype.
        parameter: A parameter, sharded or not.

    Returns:
        A tensor sharded as the parameter is, where it has its shape; else one that every process
        has whole. Of `value`'s dtype, on the parameter's device.
    """
    if not isinstance(parameter, DTensor):
        value = value.to(parameter.device, copy=True)
        if dist.is_initialized():
            dist.broadcast(value, 0)
        return value
    mesh = parameter.device_mesh
    placements = parameter.placements if value.shape == parameter.shape else [Replicate()]
    spread = distribute_tensor(value.detach().to(mesh.device_type), mesh, placements)
    return spread.to(parameter.device)  # host memory, where shards are offloaded


def refill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Give each process its part of process 0's values; a collective.

    Args:
        parameter: A sharded parameter; changed in place.
        whole: What it was before it was sharded.
    """
    part = place_like(whole, parameter)
    if isinstance(parameter, DTensor) and isinstance(part, DTensor):
        with torch.no_grad():
            parameter.to_local().copy_(part.to_local())


def numbered_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gather(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The whole state dict of an optimizer with sharded state; a collective.

    Args:
        optimizer: The optimizer.
        keep: Whether this process wants it.

    Returns:
        What ``Optimizer.state_dict`` gives, with whole tensors in host memory; empty where it is
        not wanted. Only one tensor at a time is gathered.
    """
    state = optimizer.state_dict()
    whole = {
        number: {name: _whole(value, keep=keep) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": whole} if keep else {}


def _whole(value: Any, *, keep: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not keep or not isinstance(value, torch.Tensor):
        return value if keep else None
    return value.detach().to("cpu", copy=True)  # what goes on training must not change it


def scatter(optimizer: Optimizer, state: Mapping[str, Any], *, source: bool) -> None:
    """Load the whole state dict that process 0 has into an optimizer; a collective.

    Args:
        optimizer: The optimizer, over sharded parameters.
        state: As from :func:`gather`; ignored where this process is not the source.
        source: Whether this is process 0.

    Raises:
        ConfigError: The state is of another number of parameters.
    """
    box: list[Any] = [_outline(state) if source else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    outline = box[0]
    parameters = numbered_parameters(optimizer)
    counted = sum(len(group["params"]) for group in outline["param_groups"])
    if counted != len(parameters):
        raise ConfigError(
            f"The saved optimizer has {counted} parameters and this one has {len(parameters)}: "
            "state would go to the wrong ones. Build the optimizer as when it was saved."
        )
    entries = {
        number: {
            name: _arrived(value, state, (number, name), parameters[number], source=source)
            for name, value in entry.items()
        }
        for number, entry in outline["state"].items()
    }
    optimizer.load_state_dict({**outline, "state": entries})


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with shape and dtype in place of each tensor worth sending on its own."""
    entries = {
        number: {
            name: value.to("meta") if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _arrived(
    value: Any,
    state: Mapping[str, Any],
    key: tuple[Any, str],
    parameter: torch.Tensor,
    *,
    source: bool,
) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    number, name = key
    return place_like(state["state"][number][name] if source else _blank(value), parameter)


def _blank(outline: torch.Tensor) -> torch.Tensor:
    return torch.empty(outline.shape, dtype=outline.dtype)
