"""The whole weights of a model that an engine has in parts, gathered and scattered.

Parameters are gathered a few at a time, and only process 0 keeps them: process 0 holds the model
besides its part, the others hold their part, and all of them a few whole parameters for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.deepspeed.strategy import local_shards, nvme_swapping

__all__ = ["gather_weights", "scatter_weights"]

_AT_A_TIME_BYTES = 256 << 20


def gather_weights(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict, whole; a collective where weights are in shards."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    # With `keep_vars` the entries are the parameters themselves, with DeepSpeed's attributes;
    # without it they would be detached placeholders.
    state = module.state_dict(keep_vars=True)
    unique_tensors = {
        id(own_tensor): own_tensor
        for own_tensor in state.values()
        if isinstance(own_tensor, torch.Tensor)
    }
    whole_tensors: dict[int, torch.Tensor] = {}
    # DeepSpeed reads ahead into the buffers through which gathering reads from disk.
    nvme_swapping.free_buffers(module)
    for tensor_group in _groups_by_size(unique_tensors.values()):
        cut_tensors = [tensor for tensor in tensor_group if local_shards.is_partitioned(tensor)]
        with GatheredParameters(cut_tensors, enabled=bool(cut_tensors)):
            if keep:
                # A copy: at stages 1 and 2 a parameter is a view of its flattened group, and
                # `torch.save` writes the whole storage of a view.
                whole_tensors |= {
                    id(own_tensor): own_tensor.detach().to("cpu", copy=True)
                    for own_tensor in tensor_group
                }
    return (
        {
            tensor_name: whole_tensors.get(id(tensor_value), tensor_value)
            for tensor_name, tensor_value in state.items()
        }
        if keep
        else {}
    )


def scatter_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict; a collective."""
    own_tensors = {
        tensor_name: tensor_value
        for tensor_name, tensor_value in module.state_dict(keep_vars=True).items()
        if isinstance(tensor_value, torch.Tensor)
    }
    misfit_text = [
        _misfit_text(module, own_tensors, state, strict=strict) if dist.get_rank() == 0 else ""
    ]
    # Process 0's list decides: the others may have an empty state, and all must broadcast alike.
    wanted_names = [[tensor_name for tensor_name in own_tensors if tensor_name in state]]
    dist.broadcast_object_list(misfit_text, 0)
    dist.broadcast_object_list(wanted_names, 0)
    if misfit_text[0]:
        raise ConfigError(str(misfit_text[0]))
    done_ids: set[int] = set()
    with torch.no_grad():
        for tensor_name in wanted_names[0]:
            tensor = own_tensors[tensor_name]
            if id(tensor) in done_ids:
                continue
            # Tied parameters are one tensor of several names.
            done_ids.add(id(tensor))
            whole_tensor = _from_first(state.get(tensor_name), tensor)
            if local_shards.is_cut(tensor):
                local_shards.assign(tensor, whole_tensor)
            else:
                tensor.detach().copy_(whole_tensor)


def _from_first(value: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Process 0's tensor on every process, in float32 where it is a floating-point one."""
    # In float32 also for a model in 16 bit, whose optimizer has a float32 copy to be set.
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    device = tensor.device
    shape = local_shards.shape_of(tensor)
    if dist.get_rank() == 0 and value is not None:
        whole_tensor = value.detach().to(device, dtype).contiguous()
    else:
        whole_tensor = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(whole_tensor, 0)
    return whole_tensor


def _misfit_text(
    module: nn.Module,
    own_tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> str:
    own_shapes = {
        tensor_name: local_shards.shape_of(own_tensor)
        for tensor_name, own_tensor in own_tensors.items()
    }
    wrong_texts = [
        f"{tensor_name} has shape {tuple(state[tensor_name].shape)} instead of {shape}"
        for tensor_name, shape in own_shapes.items()
        if tensor_name in state and tuple(state[tensor_name].shape) != shape
    ]
    if strict:
        wrong_texts += [
            f"{tensor_name} is missing" for tensor_name in own_tensors if tensor_name not in state
        ]
        wrong_texts += [
            f"{tensor_name} is unknown" for tensor_name in state if tensor_name not in own_tensors
        ]
    if not wrong_texts:
        return ""
    more_text = f" and {len(wrong_texts) - 5} more" if len(wrong_texts) > 5 else ""
    return (
        f"The state does not fit {type(module).__name__}: "
        f"{'; '.join(wrong_texts[:5])}{more_text}. Weights would go to the wrong places. Load the "
        "state of the same model, or give strict=False for names alone."
    )


def _groups_by_size(cut_tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists that are not too big together, gathered."""
    group: list[torch.Tensor] = []
    group_bytes = 0
    for tensor in cut_tensors:
        # A placeholder of ZeRO-3 is empty; `ds_numel` is what it takes when it is gathered.
        element_count = int(getattr(tensor, "ds_numel", tensor.numel()))
        # One at a time from disk: each takes one of the few buffers.
        is_alone = nvme_swapping.is_on_disk(tensor) or any(map(nvme_swapping.is_on_disk, group))
        if group and (
            is_alone or group_bytes + element_count * tensor.element_size() > _AT_A_TIME_BYTES
        ):
            yield group
            group = []
            group_bytes = 0
        group.append(tensor)
        group_bytes += element_count * tensor.element_size()
    if group:
        yield group
