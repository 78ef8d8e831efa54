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
from nbaccel.base.units import first_few
from nbaccel.deepspeed.strategy import local_shards, nvme_swapping

_AT_A_TIME_BYTES = 256 << 20


def gather_weights(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict, whole; a collective where weights are in shards."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    # With `keep_vars` the entries are the parameters themselves, with DeepSpeed's attributes;
    # without it they would be detached placeholders.
    state = module.state_dict(keep_vars=True)
    tensors = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    whole: dict[int, torch.Tensor] = {}
    # DeepSpeed reads ahead into the buffers through which gathering reads from disk.
    nvme_swapping.free_buffers(module)
    for group in _groups_by_size(tensors.values()):
        cut = [tensor for tensor in group if local_shards.is_partitioned(tensor)]
        with GatheredParameters(cut, enabled=bool(cut)):
            for tensor in group if keep else ():
                # A copy: at stages 1 and 2 a parameter is a view of its flattened group, and
                # `torch.save` writes the whole storage of a view.
                whole[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return {name: whole.get(id(value), value) for name, value in state.items()} if keep else {}


def scatter_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict; a collective."""
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    misfit = _misfit_text(module, own, state, strict=strict) if dist.get_rank() == 0 else ""
    # Process 0's list decides: the others may have an empty state, and all must broadcast alike.
    told: list[Any] = [misfit, [name for name in own if name in state]]
    dist.broadcast_object_list(told, 0)
    misfit, wanted_names = told
    if misfit:
        raise ConfigError(misfit)
    done: set[int] = set()
    with torch.no_grad():
        for name in wanted_names:
            tensor = own[name]
            if id(tensor) in done:
                continue
            # Tied parameters are one tensor of several names.
            done.add(id(tensor))
            # In float32 also for a model in 16 bit, whose optimizer has a float32 copy to be set.
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            shape = local_shards.shape_of(tensor)
            whole = torch.empty(shape, dtype=dtype, device=tensor.device)
            if dist.get_rank() == 0:
                whole.copy_(state[name])
            dist.broadcast(whole, 0)
            if local_shards.is_cut(tensor):
                local_shards.assign(tensor, whole)
            else:
                tensor.detach().copy_(whole)


def _misfit_text(
    module: nn.Module, own: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> str:
    wrong = [
        f"{name} has shape {tuple(state[name].shape)} instead of {local_shards.shape_of(tensor)}"
        for name, tensor in own.items()
        if name in state and tuple(state[name].shape) != local_shards.shape_of(tensor)
    ]
    if strict:
        wrong += [f"{name} is missing" for name in own if name not in state]
        wrong += [f"{name} is unknown" for name in state if name not in own]
    if not wrong:
        return ""
    return (
        f"The state does not fit {type(module).__name__}: {first_few(wrong, 5, separator='; ')}. "
        "Weights would go to the wrong places. Load the state of the same model, or give "
        "strict=False for names alone."
    )


def _groups_by_size(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists that are not too big together, gathered."""
    group: list[torch.Tensor] = []
    group_bytes = 0
    for tensor in tensors:
        # A placeholder of ZeRO-3 is empty; `ds_numel` is what it takes when it is gathered.
        num_bytes = int(getattr(tensor, "ds_numel", tensor.numel())) * tensor.element_size()
        # One at a time from disk: each takes one of the few buffers.
        is_alone = nvme_swapping.is_on_disk(tensor) or any(map(nvme_swapping.is_on_disk, group))
        if group and (is_alone or group_bytes + num_bytes > _AT_A_TIME_BYTES):
            yield group
            group = []
            group_bytes = 0
        group.append(tensor)
        group_bytes += num_bytes
    if group:
        yield group
